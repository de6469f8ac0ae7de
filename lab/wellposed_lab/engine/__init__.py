"""Plans, runs and records experiments, and judges published claims by the records. It imports no experiment."""
