"""The study: trains free, smoothing and sharpening ViTs and writes the papers' tables and figures on that data.

    from overtone.study import Plan, study

    result = study(Plan.of("digits"), "reports/study-digits")     # goes on where it was stopped
    print(result.report, result.all_claims_hold)

It needs packages that overtone itself does not: pip install 'overtone[study]'.
"""

from overtone.study.plan import OPTIONAL_PARTS, PARTS, REGIMES, Plan, Run
from overtone.study.study import StudyResult, study
