"""After how many steps a slow sample goes to Newton's method: a rule from `benchmarks.solve.solver_choice`."""


def patience(states: int) -> int:
    """Returns after how many steps a sample that is still not finished goes to Newton's method.

    About the steps that Newton's forward pass costs at a usual batch, so that a sample takes at most about twice
    as long as it would have with the better of the two, whatever its rate (the ski-rental argument). It looks at
    nothing but the number of states: a sample's way does not depend on its batch companions.

    Measured in float32 on one thread, ReLU, contractions 0.99 and 0.999: forward and backward Newton's method
    costs 1500 to 2700 plain steps at n = 20 and batch 128, 280 to 1100 at (64, 512), 130 to 740 at (190, 500),
    170 to 590 at (300, 256) and 90 to 530 at (512, 64).

    Example:
        >>> patience(20), patience(64), patience(300)
        (675, 262, 115)
    """
    return 75 + 12000 // states
