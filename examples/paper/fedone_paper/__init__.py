"""The paper's tables and figures, one command each.

1. `studies.yaml` declares the methods and the studies (tables and figures). A study is a run, a
   grid of changes to it, and seeds, in full and for ``--quick``. Pilots are runs that choose
   learning rates.
2. A trial is a run at one point of the grid with one seed: a function of JSON options and files.
   `fedone_sdk.evaluation.engine` runs missing trials, and keeps their results as JSON.
3. A report has Markdown tables (`tables.table`), figures (`fedone_sdk.reports.figures`), sentences
   and exact intervals (`statistics`). It shows the paper's numbers (`paper.yaml`) next to its own.
"""

from fedone_paper.settings import Settings, declared
from fedone_paper.study import Report, Study, find_study, run_study

__all__ = ["Report", "Settings", "Study", "declared", "find_study", "run_study"]
