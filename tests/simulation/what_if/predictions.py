"""Predictions of a system simple enough to know the best candidate by hand, for tests of what reads them."""

from typing import Any

from tasks.simulation.what_if.prediction import Prediction


def prediction(step_seconds: float, usd_per_hour: float, **changes: Any) -> Prediction:
    fields: dict[str, Any] = {
        "step_seconds": step_seconds,
        "tokens_per_s": 1000 / step_seconds,
        "usd_per_hour": usd_per_hour,
        "usd_per_step": usd_per_hour * step_seconds / 3600,
        "h20_hours_per_step": usd_per_hour * step_seconds / 7200,
        "stage_seconds": {"get_batch": 0.6 * step_seconds, "train_step": 0.4 * step_seconds},
        "utilisation": {"h20": 0.5, "h800": 0.4},
        "staleness": [3, 1],
        "staleness_mean": 0.25,
        "wasted_share": 0.05,
        "steps": 4,
        "virtual_seconds": 5 * step_seconds,
        "wall_seconds": 0.1,
        "events": 1000,
    }
    return Prediction(**{**fields, **changes})


def split(rollout: int, train: int) -> Prediction:
    """A step of 1200 device-seconds of rollout beside 600 of training, 2 USD an hour for each device."""
    return prediction(max(1200 / rollout, 600 / train), 2.0 * (rollout + train))
