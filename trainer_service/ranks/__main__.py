"""One of a trainer's other ranks: `python -m trainer_service.ranks BEGIN`, started by the first. It ends with it.

Standard input says how long the next command is, which then comes through the group.
"""

import os
import signal
import sys
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from base_model.device import free_bytes, prepare_cpu
from common.children.helpers import LENGTH_BYTES, die_with_parent
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.backbone.sharding import forget_pass
from trainer_service.lora import AdapterLayout, AdapterStack
from trainer_service.ranks import commands
from trainer_service.ranks.commands import AddUp, Backward, FindFree, NewStack, Put, RankCommand, RankForward, Remove
from trainer_service.ranks.group import Begin, RankGroup, find_store, split


@dataclass(slots=True)
class Follower:
    """Does its part of what the first rank says, and holds the same adapters, with its shares' gradients."""

    group: RankGroup
    backbone: ModulesBackbone
    _stacks: dict[int, AdapterStack] = field(default_factory=dict[int, AdapterStack])
    _learning: tuple[Tensor, list[int]] | None = None
    """The log-probs of the last forward that learns; all ranks' numbers of them."""

    def run(self) -> None:
        """Runs until standard input ends."""
        while length := sys.stdin.buffer.read(LENGTH_BYTES):
            self._do(commands.decode(self.group.hear(int.from_bytes(length))))

    def _do(self, command: RankCommand) -> None:
        match command:
            case NewStack():
                shapes = tuple(map(torch.Size, command.shapes))
                layout = AdapterLayout(command.rank, command.names, shapes)
                self._stacks = {number: stack for number, stack in self._stacks.items() if not stack.empty}
                self._stacks[command.stack] = AdapterStack(layout, self.group.device)
            case Put():
                self._put(command, self._stacks[command.stack])
            case Remove():
                self._stacks[command.stack].remove(command.place)
            case AddUp():
                self.group.add_up(self._stacks[command.stack].gradient(command.place))
            case RankForward():
                self._forward(command)
            case Backward():
                self._backward()
            case FindFree():
                self.group.least(free_bytes(self.group.device))

    def _put(self, command: Put, stack: AdapterStack) -> None:
        values_P = torch.empty(stack.layout.num_values, device=self.group.device)
        self.group.hand_on(values_P)
        place = stack.put(values_P, command.scale)
        assert place == command.place

    def _forward(self, command: RankForward) -> None:
        placed = command.adapters
        adapters = None if placed is None else [(self._stacks[stack], place) for stack, place in placed]
        shares = split(command.sequences, adapters, self.group.num_ranks)
        own, sizes = shares[self.group.rank], [share.num_targets for share in shares]
        with torch.set_grad_enabled(command.learns):
            own_M = self.backbone.checkpointing(command.num_checkpointed).logprobs(own.sequences, own.adapters)
        if self.group.lacking(self.backbone):
            del own_M
            forget_pass(self.backbone)
            return
        self.group.collect(own_M.detach(), sizes)
        if command.learns:
            self._learning = own_M, sizes

    def _backward(self) -> None:
        assert self._learning is not None
        (own_M, sizes), self._learning = self._learning, None
        own_M.backward(self.group.hand_out([], sizes))  # pyright: ignore
        if self.group.lacking(self.backbone):
            del own_M
            forget_pass(self.backbone)


def main() -> None:
    begin = msgspec.json.decode(sys.argv[1], type=Begin)
    for number in (signal.SIGINT, signal.SIGTERM):  # the first rank hears them too, and decides
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != begin.parent:  # it ended before the line above took effect
        sys.exit(1)
    prepare_cpu(begin.threads)
    group = RankGroup(begin, find_store(begin.port))
    group.join()
    Follower(group, group.load()).run()
    group.leave()


if __name__ == "__main__":
    main()
