"""Rolling averages, rolling argmax and spiky series (000, 001, 002)."""

from wellposed_lab.experiments.sequences import lengths, rolling_argmax, rolling_average, spiky

SUITES = (
    rolling_average.SUITE,
    rolling_argmax.SUITE,
    spiky.SUITE,
    lengths.SUITE,
)
