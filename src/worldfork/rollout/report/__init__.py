"""The report of a run: its figures, and a page that shows them by itself."""

from worldfork.rollout.report.figures import RunFigures, figures_of
from worldfork.rollout.report.page import write_report

__all__ = ["RunFigures", "figures_of", "write_report"]
