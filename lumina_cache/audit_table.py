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
