"""The event table as a page: ``python -m lumina_cache.audit_table > docs/log.md``."""

from __future__ import annotations

from .audit import EVENTS, KEPT_IN_MEMORY, SCHEMA, Field

__all__ = ["page"]

_INTRO = f"""# The audit log

`LuminaCache(model, log="run.jsonl")` writes one JSON object per line; `log=True` makes a new file in
`$XDG_STATE_HOME/lumina_cache` (by default `~/.local/state/lumina_cache`); without `log` the last {KEPT_IN_MEMORY:,}
records stay in memory, in `cache.log.records`. Each record is flushed as it is written, because a process that runs out
of memory on Apple silicon may vanish without an exception. Files have mode 0600. No key, value, token or text is
written. If the file cannot be written, one warning says so and generation goes on.

    lumina-cache log run.jsonl          # check every line and print one per event
    lumina-cache gap run.jsonl          # what the backend's limits cost at each decision

```python
from lumina_cache import read_log
contents = read_log("run.jsonl")
contents.of("decision")[0]["candidates"]    # every action weighed, with its terms and reasons
contents.problems                           # one sentence per line that does not follow this table
```

Unknown is `null` with a reason beside it, never 0. Fields ending in `_total` count since the start, `_step` belongs to
one step. This is schema {SCHEMA}; a reader refuses any other.

Every record has `schema`, `event`, `seq` (from 1, without gaps, per cache), `time` (Unix seconds) and `cache` (an id of
the cache object: a deep copy writes into the same file under its own).

## Candidates

In memory and from `read_log` the `candidates` of a decision are a list of

```json
{{
  "action": "evict:keydiff@rows=1422,recent=32+quant:kivi,bits=4,group=32",
  "feasible": false,
  "reasons": [{{"code": "missing_capability", "text": "ROW_CHOICE: …", "capability": "ROW_CHOICE"}}],
  "inputs": {{"nbytes_next": 20367360, "kl": 0.0106, "p95": 0.0146, "limit": 26542080, "…": "…"}},
  "score": {{"total": -3.94, "Q": 0.53, "T": 3.41, "R": 0.0}}
}}
```

with all that `lumina_cache.policy.Inputs` has. In the file, where candidates repeat each other, everything is said once:

| `candidates.` | what it is |
| --- | --- |
| `same` | inputs that all candidates have alike: name → value |
| `reasons` | every reason that is given: code, text, and `wanted`, `limit`, `capability` where there are any |
| `stored` | `fields`, and as many values in each of `rows`: the ways of storing the layers |
| `each` | `fields`, and as many values in each of `rows`: the candidates |

A row of `stored` has the text that `action` ends with, and the inputs that depend on nothing else than how layers are
stored. A row of `each` has its place in `stored` and those of its `reasons` (from 0), the text that `action` begins with,
inputs of its own, and its `score`.

A candidate is feasible if it has no reason. Q, T and R follow from the inputs and `state.weights` by the formulas of
`policy/score.py`, and `score` is their sum with its sign. So a line holds all that its decision was made on, in about a
fifth of the bytes: some 31 kB for 195 candidates.

```sh
# the actions of the first decision by their scores, the best one last
grep -m1 '"event":"decision"' run.jsonl |
  jq -r '.candidates as $c | $c.each.rows[] | "\\(last) \\(.[1])\\($c.stored.rows[.[0]][0])"' | sort -n
```

## Events
"""


def page() -> str:
    """The page in Markdown, made from the table that the reader checks against."""
    parts = [_INTRO]
    for event, fields in EVENTS.items():
        parts.append(f"### `{event}`\n")
        parts.append("| field | type | meaning |\n| --- | --- | --- |")
        parts += [f"| `{name}` | {_types(field)} | {field.meaning} |" for name, field in fields.items()]
        parts.append("")
    return "\n".join(parts)


def _types(field: Field) -> str:
    return " or ".join("null" if t is type(None) else t.__name__ for t in field.types)


if __name__ == "__main__":
    print(page())
