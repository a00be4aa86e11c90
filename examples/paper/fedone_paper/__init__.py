"""The paper's tables and figures, one command each.

1. `studies.yaml` declares the methods and the studies: one run, the axes along which it differs,
   and seeds, in full and for ``--quick``. Pilots choose learning rates.
2. A point of the grid and a seed make a trial: a function of JSON options and input files.
3. `fedone_sdk.evaluation.engine` runs the trials that have no record yet, in processes or on Ray,
   and keeps every result as JSON.
4. A report makes Markdown tables (`tables.table`), figures (`fedone_sdk.reports.figures`) and
   sentences of the results, with exact intervals (`statistics`), and computes nothing else.
5. `paper.yaml` holds what the paper prints, and every report shows it next to its own numbers.
"""

from fedone_paper.settings import Settings, declared
from fedone_paper.study import Report, Study, find_study, run_study

__all__ = ["Report", "Settings", "Study", "declared", "find_study", "run_study"]
