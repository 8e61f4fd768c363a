"""One Prometheus page out of those of all engines: each sample gets a `worker` label."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S.*)$")


def merge_pages(pages: Mapping[str, str]) -> str:
    """Join pages by engine URL; help and type lines of a family appear once, before its samples."""
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for url, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split()[2]
                lines = comments.setdefault(family, [])
                if line not in lines:
                    lines.append(line)
            elif (match := _SAMPLE.match(line)) is not None:
                home = family if family and match["name"].startswith(family) else match["name"]
                samples.setdefault(home, []).append(_labelled(match, url))
    families = dict.fromkeys([*comments, *samples])
    lines = [line for family in families for line in (*comments.get(family, ()), *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in lines)


def _labelled(match: re.Match[str], url: str) -> str:
    labels = f'{match["labels"]},worker="{url}"' if match["labels"] else f'worker="{url}"'
    return f"{match['name']}{{{labels}}} {match['value']}"
