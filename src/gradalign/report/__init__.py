"""The report page: what is in run folders, on one page that needs no network.

``gather.py`` reads folders, ``experiments.py`` sorts runs, ``order.py`` and ``table.py`` compare, ``series.py`` makes
the curves' numbers, ``page.py`` and ``sections.py`` the page, ``figures.py`` the pictures for a paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradalign.runs.read import Gathered


def write_report(
    folders: Sequence[Path],
    output: Path,
    *,
    title: str | None = None,
    figures: Path | None = None,
    unfinished: bool = False,
) -> Path:
    """Write one self-contained page about all runs in and below the folders; an old page is replaced at once.

    Args:
        folders: Run folders, comparisons, sweeps, or folders above them.
        output: Where the page goes; its folder is made when it is missing.
        title: The page's title (default: the experiments' names).
        figures: A folder to write the same figures to, as PDF and PNG.
        unfinished: Show runs that have not finished, too.

    Returns:
        The page's path.

    Raises:
        GradalignError: There is no run to report.
    """
    from gradalign.runs.read import gather

    return report_gathered(gather(folders, unfinished=unfinished), output, title=title, figures=figures)


def _set_aside(gathered: Gathered) -> None:
    """Leave out, by name, each run that cannot be shown even by itself: one folder must not end the whole report."""
    from gradalign.errors import GradalignError, shown_text
    from gradalign.report.experiments import arrange
    from gradalign.report.page import page_bytes
    from gradalign.runs.find import Skipped

    shown = []
    for run in gathered.runs:
        try:
            page_bytes(arrange([run]), [])
            shown.append(run)
        except Exception as error:
            reason = shown_text(f"it cannot be shown ({type(error).__name__}: {error})"[:200])
            gathered.skipped.append(Skipped(folder=shown_text(run.folder), reason=reason))
    if not shown:
        raise GradalignError(f"there is no run that can be reported; {gathered.skipped[-1]}")
    gathered.runs = shown


def report_gathered(
    gathered: Gathered,
    output: Path,
    *,
    title: str | None = None,
    figures: Path | None = None,
    on_figure: Callable[[Path], None] | None = None,
) -> Path:
    """Write the page, and the figures where asked for, about runs read already; ``on_figure`` hears of each figure.

    A run that got past the reader and still cannot be shown moves from ``gathered.runs`` to ``gathered.skipped``.
    """
    from gradalign.errors import GradalignError
    from gradalign.report.experiments import arrange
    from gradalign.report.page import page_bytes
    from gradalign.runs import write_whole

    if not gathered.runs:
        raise GradalignError("there is no finished run to report; give a run's folder, a comparison's, or one above")
    if output.is_dir():
        raise GradalignError(f"{output} is a folder; name the page, for example {output / 'report.html'}")
    if figures is not None and figures.exists() and not figures.is_dir():
        raise GradalignError(f"{figures} is a file; the figures need a folder")
    try:
        page = page_bytes(arrange(gathered.runs), gathered.skipped, title)
    except Exception:
        _set_aside(gathered)
        page = page_bytes(arrange(gathered.runs), gathered.skipped, title)
    experiments = arrange(gathered.runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, page)
    if figures is not None:
        from gradalign.report.figures import write_figures

        write_figures(experiments, figures, on_figure)
    return output
