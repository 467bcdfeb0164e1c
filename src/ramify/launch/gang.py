"""The environment variables by which the ranks of a gang find each other."""

from collections import Counter
from collections.abc import Sequence

from ramify.launch.launcher import ProcessSlot
from ramify.run.fencing.token import GANG_TOKEN_VARIABLE, FencingToken


def build_gang_variables(slots: Sequence[ProcessSlot], token: FencingToken) -> list[dict[str, str]]:
    """Return the variables of each rank; none for a process that is no gang.

    Rank 0 listens at MASTER_ADDR and MASTER_PORT. LOCAL_RANK counts the ranks of one node. The token tells the starts
    of a gang apart, so that a rank of an earlier start cannot join.
    """
    if len(slots) == 1:
        return [{}]
    variables, num_local_ranks = list[dict[str, str]](), Counter[str]()
    for rank, slot in enumerate(slots):
        variables.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(slots)),
                "LOCAL_RANK": str(num_local_ranks[slot.host]),
                "MASTER_ADDR": slots[0].host,
                "MASTER_PORT": str(slots[0].port),
                GANG_TOKEN_VARIABLE: str(token),
            }
        )
        num_local_ranks[slot.host] += 1
    return variables
