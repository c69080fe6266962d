"""Train a policy on games that a second process plays, with weights that it receives while training goes on.

Every rank has a player. After each step it gets the weights that have changed, in bf16, one by one through shared
memory, and plays the next games while the rank trains on the last ones. A first layer is frozen, and is sent once.

python examples/rollouts.py                                       # one rank and its player
torchrun --standalone --nproc-per-node 2 examples/rollouts.py     # two ranks, each with a player
"""

from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as mp
from torch import nn

import ztrans as zt

SEEN, ACTIONS = 8, 4


def make_policy() -> nn.Module:
    torch.manual_seed(0)  # the same on all ranks
    policy = nn.Sequential(nn.Linear(SEEN, 64), nn.Tanh(), nn.Linear(64, ACTIONS))
    policy[0].requires_grad_(False)
    return policy


@torch.no_grad()
def play(trainer: Connection, seed: int, games: int) -> None:
    """The player: receive weights, play games with them, send these, until the trainer hangs up."""
    policy = make_policy()
    torch.manual_seed(seed)
    while True:
        try:
            while (message := trainer.recv()) is not None:  # a weight; None ends them
                name, weight = message
                policy.get_parameter(name).copy_(weight)
        except EOFError:
            return
        seen = torch.randn(games, SEEN)
        actions = torch.distributions.Categorical(logits=policy(seen)).sample()
        won = actions == seen[:, :ACTIONS].argmax(1)
        trainer.send((seen, actions, won.float()))


def main(*, steps: int = 200, games: int = 512, lr: float = 0.02) -> list[float]:
    mesh = zt.make_mesh("cpu", dp=-1)
    context = mp.get_context("forkserver")
    player, far_end = context.Pipe()
    process = context.Process(target=play, args=(far_end, mesh.get_rank(), games // mesh.size()))
    process.start()
    far_end.close()

    policy = make_policy()
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=lr)

    def loop_step(seen, actions, won):
        optimizer.zero_grad()
        log_p = policy(seen).log_softmax(1).gather(1, actions[:, None]).squeeze(1)
        (-log_p * (won - 1 / ACTIONS)).mean().backward()
        optimizer.step()
        return won.mean()

    step, state = zt.lift(loop_step, policy, optimizer)
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(step)
    state = step.shard(state)

    sent: dict = {}  # what the player has

    def send_weights() -> int:
        weights = zt.state_dict(policy, state)
        count = 0
        for name, weight in zt.stream_weights(weights, dtype=torch.bfloat16, since=sent):
            player.send((name, weight))
            count += 1
        player.send(None)
        return count

    wins = []
    send_weights()
    for i in range(steps):
        played = player.recv()
        count = send_weights()  # the player plays with these while this rank trains
        state, won = step(state, *played)
        wins.append(won.item())
        if mesh.get_rank() == 0 and (i % 20 == 0 or i == steps - 1):
            print(f"step {i:4d}   won {wins[-1]:.3f}   weights sent {count}")
    player.recv()
    player.close()
    process.join()
    return wins


if __name__ == "__main__":
    main()
