"""What won, beside the script as it is, on seeds that the search has not seen."""

from __future__ import annotations

from hasten.target.account import Account
from hasten.target.found import SeedPair
from hasten.target.whole import Candidate, WholeRun


class FreshSeeds:
    """Runs finalists and the script as it is on the seeds 1, 2, ..., in turn.

    Args:
        account: The search's.

    Attributes:
        pairs: Both sides of each seed, of the finalist that was asked last.
    """

    def __init__(self, account: Account) -> None:
        self.pairs: list[SeedPair] = []
        self._account = account
        self._plain: dict[int, WholeRun] = {}  # by seed

    def why_not(self, finalist: WholeRun) -> str:
        """Return why a finalist is not the winner; "" if it is, also where there was no time to see."""
        account, self.pairs = self._account, []
        for seed in range(1, account.options.seeds + 1):
            if not account.affords(finalist.seconds + (0.0 if seed in self._plain else account.plain.to_goal)):
                account.untried.append(
                    f"fresh seeds from {seed} on: they would have cost more than --runs or --budget allow"
                )
                return ""
            if seed % 2:
                self._plain_of(seed)
            most = max(2 * finalist.seconds, account.plain.to_goal)
            goal = account.runs.goal
            run = account.runs.run(finalist.candidate, finalist.share, seed, "fresh seeds", goal, most)
            account.tell(run)
            if account.out_of_time:
                return ""
            if run.to_goal is None:
                return f"missed the target on a fresh seed ({run.outcome})"
            plain = self._plain_of(seed)
            if plain.to_goal is not None or (plain.lived and not account.out_of_time):
                self.pairs.append(SeedPair(seed, plain.to_goal, plain.seconds, run.to_goal, run.seconds))
        return ""

    def _plain_of(self, seed: int) -> WholeRun:
        """Run the script as it is on a seed, until it has reached the goal; once."""
        account = self._account
        if seed not in self._plain:
            goal = account.runs.goal
            run = self._plain[seed] = account.runs.run(Candidate(), 1.0, seed, "fresh seeds", goal, None, stop=True)
            account.tell(run)
            if run.to_goal is None and not account.out_of_time:
                account.notes.append(f"under seed {seed} the script as it is did not reach the target: {run.outcome}")
        return self._plain[seed]
