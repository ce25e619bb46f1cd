"""Guards, the step, logical ranks and their reduction, the loop; the log, the summary, the plan (no torch)."""
