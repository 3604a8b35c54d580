"""What runs the cases: case, check and timing of a call, a run of many, its report, the comparison of two builds."""
