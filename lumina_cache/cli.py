"""``lumina-cache``: parse, call, print. Everything else lives in the library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from .errors import LuminaError
from .lab.blas import preload_openblas

try:
    import typer
except ModuleNotFoundError as error:  # the command line is an extra
    sys.exit(f"lumina-cache: {error.name} is not installed; install it with: pip install 'lumina-cache[cli]'")

__all__ = ["app", "main"]

#: Exit codes besides 0: something the user can mend; interrupted.
USER_ERROR, INTERRUPTED = 2, 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="An adaptive KV cache for MLX-LM that holds a memory budget and writes down every decision.",
)

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="A folder or repository that mlx_lm.load reads; default: SmolLM2-135M."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        "-b",
        help="Memory for the KV cache: 512MB, 2GB, a share of what MLX may use such as 40%, or auto.",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option("--policy", help="Who decides: adaptive (the default), greedy, window, or off for nobody."),
]
Plan = Annotated[
    str | None,
    typer.Option(
        "--plan",
        help="What to do to the rows when the prompt is over, instead of a budget: an action's text form.",
    ),
]
Protect = Annotated[
    list[str] | None,
    typer.Option("--protect", help="Positions FIRST-END whose rows are never evicted; may be given again."),
]
Disk = Annotated[
    str | None,
    typer.Option(
        "--disk", help="A directory that rows may be moved to; 'default': one in the cache directory."
    ),
]
LogPath = Annotated[
    Path | None,
    typer.Option("--log", help="Where to write the audit log; default: a new file in the state directory."),
]


def main(argv: list[str] | None = None) -> None:
    """Entry point: no traceback for a user's mistake, and a clean end on Ctrl-C."""
    # Before anything imports MLX: its Linux wheel binds its BLAS when it is loaded.
    preload_openblas()
    try:
        code = app(args=argv, standalone_mode=False)
    except LuminaError as error:
        typer.echo(f"lumina-cache: {error}", err=True)
        code = USER_ERROR
    except typer.Abort:
        code = INTERRUPTED
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        code = INTERRUPTED
    except Exception as error:
        code = _usage_error(error)
        if code is None:
            raise
    sys.exit(code if isinstance(code, int) else 0)


def _usage_error(error: Exception) -> int | None:
    """Exit code of a command-line mistake (typer's own exceptions), after showing it; None if it is something else."""
    show: Callable[[], None] | None = getattr(error, "show", None)
    if show is None:
        return None
    show()
    return int(getattr(error, "exit_code", USER_ERROR))


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from ._version import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command(
    epilog="Examples:  lumina-cache demo   |   lumina-cache demo --budget 24MB   |   "
    "lumina-cache demo --model mlx-community/Llama-3.2-3B-Instruct-4bit --budget 200MB"
)
def demo(
    model: Model = None,
    budget: Budget = None,
    policy: Policy = None,
    log: LogPath = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 48,
) -> None:
    """Answer a question about a long document twice: with the stock cache and under a memory budget."""
    from .lab.demo import run_demo

    run_demo(model=model, budget=budget, policy=policy, log=log, max_tokens=max_tokens)


@app.command(
    epilog="Examples:  lumina-cache run --prompt 'Why is the sky blue?'   |   "
    "lumina-cache run --prompt-file notes.txt --budget 512MB --model ~/models/llama   |   "
    "cat notes.txt | lumina-cache run --prompt-file - --json   |   lumina-cache run -f notes.txt "
    "--plan evict:keydiff@rows=512+quant:affine,bits=8 --protect 0-40"
)
def run(
    model: Model = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt itself.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", "-f", help="A text file with the prompt; - for standard input."),
    ] = None,
    budget: Budget = None,
    policy: Policy = None,
    plan: Plan = None,
    protect: Protect = None,
    disk: Disk = None,
    log: LogPath = None,
    recall: Annotated[
        float,
        typer.Option(
            help="How much of the answer will repeat what the prompt says, word by word: 0 (none of it) to 1.",
            min=0.0,
            max=1.0,
        ),
    ] = 0.5,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 256,
    raw: Annotated[
        bool, typer.Option("--raw", help="Pass the prompt as it is, without the chat template.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Generate from a prompt with LuminaCache, and say what the cache did."""
    from .lab.run import run_prompt

    text = _prompt(prompt, prompt_file)
    run_prompt(
        model=model,
        prompt=text,
        budget=budget,
        policy=policy,
        plan=plan,
        protect=[_range(one) for one in protect or ()],
        disk=None if disk is None else True if disk == "default" else disk,
        log=log,
        recall=recall,
        max_tokens=max_tokens,
        raw=raw,
        as_json=json,
    )


@app.command(
    epilog="Examples:  lumina-cache gap run.jsonl   |   lumina-cache gap run.jsonl --html chat.html   |   "
    "lumina-cache gap campaign/ --html report.html --plots figures/   |   "
    "lumina-cache gap run.jsonl --json | jq .mean"
)
def gap(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="STORE|LOG...", help="Stores of observations, analysed as one, and audit logs."
        ),
    ],
    html: Annotated[
        Path | None, typer.Option(help="Write one HTML page with interactive figures, for reading offline.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Write the figures as PNG and SVG into this folder.")
    ] = None,
    json: AsJson = False,
) -> None:
    """What the backend's limits cost, and which limit it was: in a campaign, or at each decision of a session."""
    from .gap.report import gap_command

    typer.echo(gap_command(paths, html=html, plots=plots, as_json_text=json, command=_command()))


@app.command(
    name="log", epilog="Examples:  lumina-cache log run.jsonl   |   lumina-cache log run.jsonl --json"
)
def show_log(path: Annotated[Path, typer.Argument(help="An audit log.")], json: AsJson = False) -> None:
    """Check an audit log against the event table and print it a line per event. Exit code 1 if lines are wrong."""
    from .audit import read_log
    from .report import log_as_json, log_as_text

    contents = read_log(path)
    typer.echo(log_as_json(contents) if json else log_as_text(contents))
    if contents.problems:
        raise typer.Exit(1)


@app.command(
    epilog="Examples:  lumina-cache estimate --config config.json --context 4k,32k,128k   |   "
    "lumina-cache estimate --model smollm2 --action quant:affine,bits=4 --action evict:sinks_window@0.50   |   "
    "lumina-cache estimate --config config.json --fits 8GB --json"
)
def estimate(
    config: Annotated[
        Path | None, typer.Option(help="A config.json, or a folder with one. No weights needed.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A folder, a repository, or smollm2, instead of --config."),
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(help="Tokens, for example 4k,32k. Default: 4k,32k,128k.")
    ] = None,
    action: Annotated[
        list[str] | None, typer.Option(help="An action's text form; may be given again.")
    ] = None,
    fits: Annotated[
        str | None, typer.Option(help="Also the longest context that fits in this much memory.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens per prefill step.", min=1)] = 2048,
    device: Annotated[str | None, typer.Option(help="cpu, metal or cuda; default: the one here.")] = None,
    json: AsJson = False,
) -> None:
    """Say what a model's cache takes at a context, and at most on the way there, before anything is loaded."""
    from .estimate_report import estimate_command

    typer.echo(
        estimate_command(
            config=config,
            model=model,
            contexts=context or ["4k,32k,128k"],
            actions=action or [],
            fits=fits,
            chunk=chunk,
            device=device,
            as_json=json,
        )
    )


@app.command(
    epilog="Examples:  lumina-cache probe   |   lumina-cache probe --model smollm2   |   "
    "lumina-cache probe --all-architectures --json > mine.json"
)
def probe(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Probe this model too: a folder, a repository, or smollm2."),
    ] = None,
    all_architectures: Annotated[
        bool,
        typer.Option("--all-architectures", help="Classify every action on every model module of mlx-lm."),
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Do not use results kept from an earlier probe.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Find out what this installation can really do with a KV cache, by doing it."""
    from rich.console import Console

    from .backend.probe_report import probe_command

    typer.echo(probe_command(model, all_architectures, json, Console(stderr=True), again=again))


@app.command(
    name="eval",
    epilog="Examples:  lumina-cache eval --quick   |   "
    "lumina-cache eval --actions keep quant:affine,bits=4 evict:sinks_window@0.50 --out result.json   |   "
    "lumina-cache eval --model ~/models/llama --text notes.txt --context 1k,4k --documents 30,10 --out result.json   |   "
    "lumina-cache eval --result result.json --page docs/eval.md",
)
def evaluate(
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[A]...", help="More actions, after --actions.")
    ] = None,
    model: Model = None,
    actions: Annotated[
        list[str] | None,
        typer.Option(
            "--actions",
            "-a",
            help="Text forms of actions, mlx-lm:kv_bits=4, mlx-lm:max_kv_size=50%, mlx-turboquant:bits=4.",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Your own text instead of prose, code and dialogue; may be given again."),
    ] = None,
    context: Annotated[str | None, typer.Option(help="Tokens, for example 1k,4k. Default: 1k.")] = None,
    documents: Annotated[
        str | None, typer.Option(help="Documents for each context, for example 30,10. Default: 30.")
    ] = None,
    tests: Annotated[str | None, typer.Option(help="Some of T1,T2,T3,T5,time. Default: all.")] = None,
    block: Annotated[int | None, typer.Option(help="Tokens per teacher-forced forward.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of planted names and of the bootstrap.", min=0)] = 0,
    rung: Annotated[
        str,
        typer.Option(
            help="How deep caches reach into mlx-lm: native, cache or hook; native,cache,hook measures each action at "
            "the least that carries it out."
        ),
    ] = "cache",
    quick: Annotated[
        bool, typer.Option("--quick", help="Two documents of 400 tokens, T1 and T2: under a minute.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The result as JSON. Run again after an interruption, it goes on.")
    ] = None,
    result: Annotated[Path | None, typer.Option(help="Show this finished result; nothing is run.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Put the table between the marks of this Markdown page.")
    ] = None,
    part: Annotated[
        str, typer.Option(help="The marks: <!-- PART: begin --> and <!-- PART: end -->.")
    ] = "eval",
    json: AsJson = False,
) -> None:
    """Measure what actions on the cache cost in quality, bytes and time. Exit code 1 if one of them is faulty."""
    from .lab.evaluate.command import eval_command

    sound = eval_command(
        model=model,
        actions=[*(actions or []), *(more or [])],
        texts=text or [],
        contexts=context,
        documents=documents,
        tests=tests,
        block=block,
        seed=seed,
        rung=rung,
        quick=quick,
        out=out,
        result=result,
        page=page,
        part=part,
        as_json_text=json,
    )
    if not sound:
        raise typer.Exit(1)


@app.command(
    epilog="Examples:  lumina-cache campaign campaigns/smollm2-first.toml --dry-run   |   "
    "lumina-cache campaign campaigns/smollm2-first.toml --out store --workers 2   |   "
    "lumina-cache campaign mine.toml --out store --json | jq .failures   |   lumina-cache gap store",
)
def campaign(
    plan: Annotated[Path, typer.Argument(help="A TOML file: models, texts, grids of actions, executions.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The store: a folder. Run again after an interruption, it goes on there."),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(help="Processes, each with a model of its own.", min=1),
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read the plan and say what would be measured; nothing is run.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Measure and simulate many actions on many documents, into one store. Exit code 1 if an action is faulty."""
    from .lab.campaign.command import campaign_command

    if out is None and not dry_run:
        raise _mistake("give --out STORE, a folder for the observations, or --dry-run")
    if not campaign_command(plan=plan, out=out or Path(), workers=workers, dry_run=dry_run, as_json=json):
        raise typer.Exit(1)


@app.command(
    epilog="Examples:  lumina-cache calibrate --quick   |   lumina-cache calibrate --model ~/models/llama   |   "
    "lumina-cache calibrate --model ~/models/llama --text notes.txt --minutes 60 --json > mine.json",
)
def calibrate(
    model: Model = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Your own text instead of prose, code and dialogue; may be given again."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few actions on one short document: a look, not a result.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(help="Start nothing new after so many. Default: 20, or 1.25 with --quick.", min=0.0),
    ] = None,
    documents: Annotated[
        int | None, typer.Option(help="Most documents to measure. Default: 12, or 1 with --quick.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The profile's file. Default: in the state directory, where it is found again."),
    ] = None,
    add_to: Annotated[
        Path | None,
        typer.Option(
            help="A finished profile: measure only the codecs that it lacks, and write both to --out."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure on a model what actions cost in quality and time, and keep it for the policy. Run again, it goes on."""
    from .lab.calibrate.command import calibrate_command

    calibrate_command(
        model=model,
        texts=text or [],
        quick=quick,
        minutes=minutes,
        documents=documents,
        out=out,
        add_to=add_to,
        as_json=json,
    )


@app.command(
    name="calibrate-queries",
    epilog="Examples:  lumina-cache calibrate-queries   |   lumina-cache calibrate-queries --model ~/models/llama --text "
    "notes.txt --text mails.txt",
)
def calibrate_queries(
    model: Model = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Your own text instead of Python's documentation and code; may be given again."),
    ] = None,
    queries: Annotated[int, typer.Option(help="Queries to keep per head.", min=1)] = 16,
    directions: Annotated[
        int, typer.Option(help="Directions to keep of each head's covariance, for expected_bank.", min=0)
    ] = 8,
    documents: Annotated[int, typer.Option(help="Most documents of 1,024 tokens to read.", min=1)] = 8,
    out: Annotated[
        Path | None,
        typer.Option(help="The bank's file. Default: in the state directory, where it is found again."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Capture what a model's queries are like, so that rows can be ranked by them without seeing any."""
    from .lab.bank.capture import CaptureSettings
    from .lab.bank.command import calibrate_queries_command

    calibrate_queries_command(
        model=model,
        texts=text or [],
        settings=CaptureSettings(queries=queries, directions=directions, documents=documents),
        out=out,
        as_json=json,
    )


@app.command(
    epilog="Examples:  lumina-cache top   |   lumina-cache top --once   |   lumina-cache top --json --seconds 10"
)
def top(
    once: Annotated[bool, typer.Option("--once", help="Show the machine once and exit.")] = False,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after so many seconds; default: on Ctrl-C.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show memory, pressure, swap, GPU and heat live, and say what this machine does not tell."""
    from .telemetry.top import run_live

    run_live(once=once, as_json=json, seconds=seconds)


@app.command(epilog="Examples:  lumina-cache doctor   |   lumina-cache doctor --json")
def doctor(json: AsJson = False) -> None:
    """Check on this machine what the library claims: expected values beside read ones. Exit code 1 if one fails."""
    from .telemetry.doctor import Status, checks

    found = checks()
    typer.echo(_as_json([asdict(c) for c in found]) if json else "\n".join(map(str, found)))
    if any(c.status is Status.FAIL for c in found):
        raise typer.Exit(1)


@app.command(
    epilog="Examples:  lumina-cache soak --profile ramp --peak 2GB --seconds 30   |   "
    "lumina-cache soak --profile sawtooth --peak 50% --seconds 60 --log soak.jsonl"
)
def soak(
    profile: Annotated[str, typer.Option(help="ramp, spike, sawtooth or steady.")] = "ramp",
    peak: Annotated[
        str, typer.Option(help="A size such as 2GB, or a share such as 50% of free memory.")
    ] = "25%",
    seconds: Annotated[float, typer.Option(help="How long.")] = 30.0,
    backing: Annotated[str, typer.Option(help="host: touched pages; mlx: buffers of MLX's device.")] = "host",
    cpu_threads: Annotated[int, typer.Option(help="Threads that keep processors busy besides.")] = 0,
    log: Annotated[Path | None, typer.Option(help="Where to write the timeline as JSON lines.")] = None,
    json: AsJson = False,
) -> None:
    """Take memory on purpose, in a process of its own, within hard limits; Ctrl-C gives it all back."""
    from .lab.soak import run as run_soak

    def say(event: dict[str, object]) -> None:
        if not json:
            typer.echo(" ".join(f"{k}={v}" for k, v in event.items()), err=True)

    report = run_soak(
        profile,
        peak=peak,
        seconds=seconds,
        on_event=say,
        log_path=log,
        backing=backing,
        cpu_threads=cpu_threads,
    )
    found = asdict(report)
    timeline = found.pop("timeline")
    typer.echo(
        _as_json({**found, "timeline": timeline})
        if json
        else "\n".join(f"{k}: {v}" for k, v in found.items())
    )
    if report.outcome == "interrupted":
        raise typer.Exit(INTERRUPTED)


db = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What was found out on many machines in one file: which actions run where, at what cost, and why not.",
)
app.add_typer(db, name="db")

DatabasePath = Annotated[
    Path | None,
    typer.Option("--db", help="The database; default: feasibility.duckdb in the data directory."),
]


@db.command(
    name="add",
    epilog="Examples:  lumina-cache probe --model smollm2 --json > mine.json && lumina-cache db add mine.json   |   "
    "lumina-cache db add docs/data/eval-smollm2-1k.json ~/.local/state/lumina_cache/profiles/*.json campaign/",
)
def db_add(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="JSON of probe, eval or calibrate, tables of architectures, and stores of observations."
        ),
    ],
    db: DatabasePath = None,
    json: AsJson = False,
) -> None:
    """Add files; what is there already stays as it is. Exit code 1 if one of them is bad; nothing of it is taken."""
    from .database.command import add_command

    text, good = add_command(files, db, as_json=json)
    typer.echo(text)
    if not good:
        raise typer.Exit(1)


@db.command(
    name="query",
    epilog="Examples:  lumina-cache db query --chip M3 --mlx-lm 0.32 --model llama --action 'quant:*'   |   "
    "lumina-cache db query --model smollm2 --state real --json   |   "
    "lumina-cache db query --about capabilities --chip M3   |   lumina-cache db query --about sources",
)
def db_query(
    chip: Annotated[str | None, typer.Option(help="Part of the chip's name, for example M3.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, metal or cuda.")] = None,
    mlx: Annotated[str | None, typer.Option(help="MLX's version or its beginning, for example 0.32.")] = None,
    mlx_lm: Annotated[str | None, typer.Option(help="mlx-lm's version or its beginning.")] = None,
    lumina_cache: Annotated[
        str | None, typer.Option("--lumina-cache", help="This library's version or its beginning.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Part of a model's name, its module in mlx-lm, or its fingerprint."
        ),
    ] = None,
    action: Annotated[
        str | None, typer.Option("--action", "-a", help="An action's text form, with * and ?.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Only what came from probe, architectures, profile, eval or campaign.")
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="Only one execution state: real, simulated or backend_infeasible.")
    ] = None,
    about: Annotated[str, typer.Option(help="actions, capabilities or sources.")] = "actions",
    limit: Annotated[int, typer.Option(help="Most rows of the table; 0 for all.", min=0)] = 50,
    db: DatabasePath = None,
    json: AsJson = False,
) -> None:
    """Which actions run on a chip, with versions and a model; which do not, and why."""
    from rich.console import Console

    from .database import Selection
    from .database.command import query_command

    selection = Selection(chip, device, mlx, mlx_lm, lumina_cache, model, action, kind, state)
    typer.echo(query_command(selection, db, about=about, limit=limit, as_json=json, console=Console()))


@db.command(
    name="merge",
    epilog="Examples:  lumina-cache db merge macbook.duckdb studio.duckdb   |   "
    "lumina-cache db merge mine.duckdb --db everyone.duckdb",
)
def db_merge(
    files: Annotated[list[Path], typer.Argument(help="Databases of other machines.")],
    db: DatabasePath = None,
    json: AsJson = False,
) -> None:
    """Take in other databases. Exit code 1 if one of them is bad; nothing of it is taken."""
    from .database.command import merge_command

    text, good = merge_command(files, db, as_json=json)
    typer.echo(text)
    if not good:
        raise typer.Exit(1)


@db.command(
    name="export",
    epilog="Examples:  lumina-cache db export out/   |   lumina-cache db export out/ --format csv",
)
def db_export(
    folder: Annotated[Path, typer.Argument(help="Where the files go, one per table.")],
    format: Annotated[str, typer.Option(help="parquet, csv or json.")] = "parquet",
    db: DatabasePath = None,
    json: AsJson = False,
) -> None:
    """Write every table as a file of its own. Execution states never share one."""
    from .database.command import export_command

    typer.echo(export_command(folder, format, db, as_json=json))


def _command() -> str:
    """The command as it could be given again; paths as they were."""
    import shlex

    return shlex.join(["lumina-cache", *sys.argv[1:]])


def _as_json(found: object) -> str:
    import json

    return json.dumps(found, default=str)


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise _mistake("give either --prompt or --prompt-file")
    if prompt is None:
        try:
            prompt = (
                sys.stdin.read() if str(prompt_file) == "-" else Path(str(prompt_file)).read_text("utf-8")
            )
        except (OSError, UnicodeDecodeError) as error:
            raise _mistake(f"cannot read the prompt from {prompt_file}: {error}") from None
    if not prompt.strip():
        raise _mistake("the prompt is empty")
    return prompt


def _range(text: str) -> range:
    """Positions FIRST to END, both included."""
    first, dash, end = text.partition("-")
    if not (dash and first.isdecimal() and end.isdecimal() and int(first) <= int(end)):
        raise _mistake(f"--protect {text}: give positions such as 0-120, the first and the last one")
    return range(int(first), int(end) + 1)


def _mistake(text: str) -> Any:
    return typer.BadParameter(text)


if __name__ == "__main__":
    main()
