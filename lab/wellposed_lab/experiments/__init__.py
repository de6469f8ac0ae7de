"""One folder an experiment: suites, runs, models, findings, pictures, tasks of its own, and the published claims.

A folder exports `SUITES`, and its `claims.toml` says what the papers claim. The engine walks this package, so a
new folder needs no entry in any list. Experiments do not import each other, but for `earthquake.eliminate`, which
eliminates features by `sparsify.eliminate`.
"""
