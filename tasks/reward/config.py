"""What a campaign says of reward workers."""

from pydantic import PositiveInt

from infra.config import Config


class RewardConfig(Config):
    workers: PositiveInt = 1
    """Warm, killable reward processes per environment worker."""
