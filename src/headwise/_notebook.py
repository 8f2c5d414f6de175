"""In notebooks, plans, readings, verdicts and dossiers show themselves as pictures and tables."""

from headwise.runs.dossier import Dossier
from headwise.types import Plan, Reading, Readings, Verdict

SHOWN = (Plan, Reading, Readings, Verdict, Dossier)


def install() -> None:
    """Give these types the method that notebooks ask for; types know no report, so it is given from outside."""
    for kind in SHOWN:
        kind._repr_html_ = _drawn  # type: ignore[union-attr]


def _drawn(record: Plan | Reading | Readings | Verdict | Dossier) -> str:
    from headwise.report import fragment

    return fragment(record)
