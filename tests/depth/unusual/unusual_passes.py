"""Passes that a recorder of blocks may get wrong, with the largest number of block calls in a chain."""

import torch
from unusual_nets import LENGTH, WIDTH, Closed, Given, InPlace, Reentrant, Residual, Returning

from gradfree import ChainError


def an_operation_between_two_runs_of_blocks(net, x):
    h = net.stem(x)
    for block in net.blocks[:2]:
        h = block(h)
    h = torch.sin(h) * net.scale
    for block in net.blocks[2:]:
        h = block(h)
    net.loss(h).backward()


def blocks_that_run_twice(net, x):
    h = net.stem(x)
    for _ in range(2):
        for block in net.blocks:
            h = block(h)
    net.loss(h).backward()


def a_repeated_block(net, x):
    h, (first, second, *_) = net.stem(x), net.blocks
    for block in (first, second, second, first):
        h = block(h)
    net.loss(h).backward()


def a_weight_used_before_the_chain(net, x):
    states = net.states(x @ net.blocks[0].linear.weight)
    net.loss(states[-1]).backward()


def a_loss_on_the_first_blocks_input(net, x):
    states = net.states(x)
    (net.loss(states[-1]) + states[0].pow(3).sum()).backward()


def a_loss_on_every_state(net, x):
    sum(net.loss(h) * i for i, h in enumerate(net.states(x))).backward()


def only_an_auxiliary_loss(net, x):
    net.loss(net.states(x)[2]).backward()


def the_taps_backward_first(net, x):
    states = net.states(x)
    net.loss(states[2]).backward(retain_graph=True)
    net.loss(states[-1]).backward()


def a_tap_of_a_graph_that_is_freed(net, x):
    states = net.states(x)
    net.loss(states[-1]).backward()
    net.loss(states[2]).backward()


def two_losses_of_one_pass(net, x):
    h = net.states(x)[-1]
    net.loss(h).backward(retain_graph=True)
    torch.sin(h).sum().backward()


def a_graph_retained_twice(net, x):
    states = net.states(x)
    loss = net.loss(states[-1]) + states[1].pow(2).sum()
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)


def two_passes_in_turns(net, x):
    first, second = net.stem(x), net.stem(x * 0.5)
    for block in net.blocks:
        first, second = block(first), block(second)
    net.loss(second).backward()
    net.loss(first).backward()


def a_state_that_retains_its_gradient(net, x):
    states = [net.stem(x)]
    for block in net.blocks:
        states.append(block(states[-1]))
        states[-1].retain_grad()
    net.loss(states[-1]).backward()
    return [h.grad for h in states[1:]]


def a_state_that_retains_its_gradient_after_the_pass(net, x):
    states = net.states(x)
    states[2].retain_grad()
    (net.loss(states[-1]) + states[2].sum()).backward()
    return [states[2].grad]


def a_hook_that_changes_the_gradient_of_a_state(net, x):
    states = net.states(x)
    states[2].register_hook(lambda gradient: gradient * 3)
    (net.loss(states[-1]) + states[2].sum()).backward()


def the_gradient_of_a_state(net, x):
    states = net.states(x)
    return torch.autograd.grad(net.loss(states[-1]) + states[2].sum(), [states[2], *net.blocks[3].parameters()])


def the_gradient_of_a_last_state_with_extra_outputs(net, x):
    h, beside = net.stem(x), 0.0
    for block in net.blocks:
        h, extra = block(h)
        beside = beside + extra.sum()
    return torch.autograd.grad(net.loss(h) + beside, [h])


def a_refused_gradient_of_a_state_and_then_backward(net, x):
    states = net.states(x)
    loss = net.loss(states[-1]) + states[2].pow(2).sum()
    try:
        found = torch.autograd.grad(loss, states[2], retain_graph=True)
    except ChainError:
        found = None
    loss.backward()
    return found


def all_blocks_frozen(net, x):
    net.blocks.requires_grad_(False)
    net.loss(net.states(x)[-1]).backward()


def everything_frozen_but_one_block(net, x):
    net.requires_grad_(False)
    net.blocks[1].requires_grad_(True)
    net.loss(net.states(x)[-1]).backward()


def a_block_frozen_after_the_pass(net, x):
    loss = net.loss(net.states(x)[-1])
    net.blocks[1].requires_grad_(False)
    loss.backward()


def a_chain_in_branches(net, x):
    h, (a, b, c, d) = net.stem(x), net.blocks
    first = a(h)
    net.loss(d(b(first)) + c(first)).backward()


def an_input_that_first_appears_after_the_first_block(net, x):
    side = torch.sigmoid(x * net.scale)
    one = torch.ones(WIDTH)
    net.loss(net.states(x, one, side, side, one)[-1]).backward()


def a_parameter_from_a_closure(net, x):
    for block in net.blocks:
        block.outside = [net.scale]
    net.loss(net.states(x)[-1]).backward()


def a_tensor_with_a_history_from_a_closure(net, x):
    shared = torch.sigmoid(net.stem(x))
    for block in net.blocks:
        block.outside = [shared]
    net.loss(net.states(x)[-1]).backward()


def an_older_state_from_a_closure(net, x):
    h = net.stem(x)
    for block in net.blocks:
        block.outside = [torch.cos(h)]
        h = block(h)
    net.loss(h).backward()


def a_change_in_place_of_a_state_that_is_needed(net, x):
    states = net.states(x)
    loss = net.loss(states[-1])
    with torch.no_grad():
        states[1].mul_(2)
    loss.backward()


def the_usual_pass(net, x):
    net.loss(net.states(x)[-1]).backward()


# The block, and the largest number of block calls.
CHAINS = {
    the_usual_pass: (Residual, 4),
    an_operation_between_two_runs_of_blocks: (Residual, 4),
    blocks_that_run_twice: (Residual, 8),
    a_repeated_block: (Residual, 4),
    a_weight_used_before_the_chain: (Residual, 4),
    a_loss_on_the_first_blocks_input: (Residual, 4),
    a_loss_on_every_state: (Residual, 4),
    only_an_auxiliary_loss: (Residual, 4),
    the_taps_backward_first: (Residual, 4),
    a_tap_of_a_graph_that_is_freed: (Residual, 4),
    two_losses_of_one_pass: (Residual, 4),
    a_graph_retained_twice: (Residual, 4),
    two_passes_in_turns: (Residual, 4),
    a_state_that_retains_its_gradient: (Residual, 4),
    a_state_that_retains_its_gradient_after_the_pass: (Residual, 4),
    a_hook_that_changes_the_gradient_of_a_state: (Residual, 4),
    the_gradient_of_a_state: (Residual, 4),
    the_gradient_of_a_last_state_with_extra_outputs: (Returning, 4),
    a_refused_gradient_of_a_state_and_then_backward: (Residual, 4),
    all_blocks_frozen: (Residual, 4),
    everything_frozen_but_one_block: (Residual, 4),
    a_block_frozen_after_the_pass: (Residual, 4),
    a_chain_in_branches: (Residual, 4),
    an_input_that_first_appears_after_the_first_block: (Given, 4),
    a_parameter_from_a_closure: (Closed, 4),
    a_tensor_with_a_history_from_a_closure: (Closed, 4),
    an_older_state_from_a_closure: (Closed, 4),
    a_change_in_place_of_a_state_that_is_needed: (Residual, 4),
}
OVER_OTHER_BLOCKS = {
    "blocks that begin with a ReLU in place": (the_usual_pass, InPlace),
    "a reentrant checkpoint inside blocks": (the_usual_pass, Reentrant),
}
PASSES = {
    **{run.__name__.replace("_", " "): (run, *rest) for run, rest in CHAINS.items()},
    **{name: (run, block, LENGTH) for name, (run, block) in OVER_OTHER_BLOCKS.items()},
}
REFUSED = {
    "a state that retains its gradient after the pass": "retain_grad",
    "a hook that changes the gradient of a state": "gradient hook",
    "the gradient of a state": "only a part of that gradient",
    "the gradient of a last state with extra outputs": "only a part of that gradient",
    "a tensor with a history from a closure": "neither an argument",
    "an older state from a closure": "neither an argument",
    "blocks that begin with a ReLU in place": "modifies its input in place",
    "a reentrant checkpoint inside blocks": "use_reentrant=True",
}
"""Passes that are refused, and words of the message."""
SPLIT = {
    "an operation between two runs of blocks": "its input is computed by the model, a hook or a reentrant checkpoint",
    "a chain in branches": "another block has used the output of the block before it: the blocks branch",
    "a state that retains its gradient": "the state before it has a gradient hook or retain_grad()",
    "the usual pass": "",
    "a loss on every state": "",
    "a repeated block": "",
}
"""Why a block starts another chain; ``""`` if none does."""
