"""The learning rate over a campaign."""


def learning_rate_share(step: int, *, warm_up_steps: int, final_share: float, steps: int) -> float:
    """The share of the learning rate at a train step: a linear rise, then a linear fall to `final_share`."""
    if step < warm_up_steps:
        return (step + 1) / warm_up_steps
    falling = max(1, steps - 1 - warm_up_steps)
    return 1.0 - (1.0 - final_share) * min(1.0, (step - warm_up_steps) / falling)
