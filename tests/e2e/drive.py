"""Train a run in a process of its own, without Prefect: `python -m tests.e2e.drive CAMPAIGN_FILE RUN`.

It begins the run or resumes it, and prints a line a step. Exit status 3 says that it lost a part.
"""

import asyncio
import sys
from typing import Any

from flows.preparation import open_run, prepare_model
from tasks.campaign import Campaign
from tasks.open_session import open_session
from tasks.supervision import PartLost
from tasks.train.loop import directly, train_loop


async def drive(campaign: Campaign, run: str) -> None:
    folder = open_run(campaign, run)
    await prepare_model.fn(campaign, folder)
    async with open_session(campaign, folder) as session:

        async def say(row: dict[str, Any]) -> None:
            print(f"step {row['step']}", flush=True)

        session.observers.append(say)
        print(f"from {session.step}", flush=True)
        await train_loop(session, directly(session))


def main() -> int:
    try:
        asyncio.run(drive(Campaign.load(sys.argv[1]), sys.argv[2]))
    except PartLost as lost:
        print(lost, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
