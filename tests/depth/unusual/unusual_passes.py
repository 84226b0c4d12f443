"""Passes that a recorder of blocks may get wrong, with the largest number of block calls in a chain."""

import torch
from unusual_nets import LENGTH, SAMPLES, WIDTH, Closed, Given, Handing, InPlace, Reentrant, Residual, Returning

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


def a_skipped_block(net, x):
    h = net.stem(x)
    for i in (0, 1, 3):
        h = net.blocks[i](h)
    net.loss(h).backward()


def blocks_in_reverse_order(net, x):
    h = net.stem(x)
    for block in reversed(net.blocks):
        h = block(h)
    net.loss(h).backward()


def a_weight_used_before_the_chain(net, x):
    states = net.states(x @ net.blocks[0].linear.weight)
    net.loss(states[-1]).backward()


def a_weight_used_after_the_chain(net, x):
    h = net.states(x)[-1]
    net.loss(h @ net.blocks[3].linear.weight).backward()


def a_penalty_on_weights(net, x):
    penalty = sum(p.pow(2).sum() for p in net.blocks.parameters())
    (net.loss(net.states(x)[-1]) + penalty).backward()


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


def the_last_states_backward_first(net, x):
    states = net.states(x)
    net.loss(states[-1]).backward(retain_graph=True)
    net.loss(states[2]).backward()


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


def two_passes_of_one_loss(net, x):
    first, second = (net.states(x * factor) for factor in (1.0, 0.5))
    (net.loss(first[-1]) + net.loss(second[-1]) * first[2].mean()).backward()


def two_passes_in_turns(net, x):
    first, second = net.stem(x), net.stem(x * 0.5)
    for block in net.blocks:
        first, second = block(first), block(second)
    net.loss(second).backward()
    net.loss(first).backward()


def a_pass_that_is_dropped(net, x):
    net.states(x)
    with torch.no_grad():
        net.states(x)
    net.loss(net.states(x)[-1]).backward()


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


def a_hook_after_blocks_that_return_their_input(net, x):
    states = net.states(x)
    states[3].register_hook(lambda gradient: gradient * 3)
    (net.loss(states[-1]) + states[1].pow(2).sum()).backward()


def the_gradient_of_a_state(net, x):
    states = net.states(x)
    return torch.autograd.grad(net.loss(states[-1]) + states[2].sum(), [states[2], *net.blocks[3].parameters()])


def the_gradient_of_the_last_state(net, x):
    h = net.states(x)[-1]
    return torch.autograd.grad(net.loss(h), [h])


def the_gradient_of_a_last_state_with_extra_outputs(net, x):
    h, beside = net.stem(x), 0.0
    for block in net.blocks:
        h, extra = block(h)
        beside = beside + extra.sum()
    return torch.autograd.grad(net.loss(h) + beside, [h])


def a_loss_on_extra_outputs(net, x):
    h, beside = net.stem(x), 0.0
    for block in net.blocks:
        h, extra = block(h)
        beside = beside + extra.pow(2).sum()
    (net.loss(h) + beside).backward()


def a_refused_gradient_of_a_state_and_then_backward(net, x):
    states = net.states(x)
    loss = net.loss(states[-1]) + states[2].pow(2).sum()
    try:
        found = torch.autograd.grad(loss, states[2], retain_graph=True)
    except ChainError:
        found = None
    loss.backward()
    return found


def the_gradient_of_some_parameters(net, x):
    return torch.autograd.grad(net.loss(net.states(x)[-1]), [net.stem.weight, net.blocks[1].linear.weight])


def all_blocks_frozen(net, x):
    net.blocks.requires_grad_(False)
    net.loss(net.states(x)[-1]).backward()


def everything_frozen_but_one_block(net, x):
    net.requires_grad_(False)
    net.blocks[1].requires_grad_(True)
    net.loss(net.states(x)[-1]).backward()


def everything_frozen_but_the_head(net, x):
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    net.loss(net.states(x)[-1]).backward()


def a_block_frozen_after_the_pass(net, x):
    loss = net.loss(net.states(x)[-1])
    net.blocks[1].requires_grad_(False)
    loss.backward()


def a_detached_state(net, x):
    h = net.stem(x)
    for i, block in enumerate(net.blocks):
        h = block(h.detach() if i == 2 else h)
    net.loss(h).backward()


def a_state_that_skips_two_blocks(net, x):
    h, (a, b, c, d) = net.stem(x), net.blocks
    first = a(h)
    net.loss(d(c(b(first)) + first)).backward()


def a_chain_in_branches(net, x):
    h, (a, b, c, d) = net.stem(x), net.blocks
    first = a(h)
    net.loss(d(b(first)) + c(first)).backward()


def an_input_that_first_appears_after_the_first_block(net, x):
    side = torch.sigmoid(x * net.scale)
    one = torch.ones(WIDTH)
    net.loss(net.states(x, one, side, side, one)[-1]).backward()


def the_state_before_as_another_input(net, x):
    h, before = net.stem(x), torch.ones(SAMPLES, WIDTH)
    for block in net.blocks:
        h, before = block(h, before), torch.cos(h)
    net.loss(h).backward()


def the_first_state_as_an_input_of_every_block(net, x):
    side = torch.cos(net.stem(x))
    net.loss(net.states(x, *[side] * LENGTH)[-1] + side).backward()


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


def a_weight_of_another_block_from_a_closure(net, x):
    for block in net.blocks:
        block.outside = [net.blocks[0].linear.bias]
    net.loss(net.states(x)[-1]).backward()


def a_change_in_place_between_blocks(net, x):
    h = net.stem(x)
    for block in net.blocks:
        h = block(h)
        h += 0.1
        h *= net.scale
    net.loss(h).backward()


def a_change_in_place_of_a_state_that_is_needed(net, x):
    states = net.states(x)
    loss = net.loss(states[-1])
    with torch.no_grad():
        states[1].mul_(2)
    loss.backward()


def a_change_in_place_of_a_weight(net, x):
    loss = net.loss(net.states(x)[-1])
    with torch.no_grad():
        net.blocks[2].linear.weight.mul_(2)
    loss.backward()


def the_usual_pass(net, x):
    net.loss(net.states(x)[-1]).backward()


# The block, the largest number of block calls, and whether all links are one chain of x + g(x) from h_0 on.
CHAINS = {
    the_usual_pass: (Residual, 4, True),
    an_operation_between_two_runs_of_blocks: (Residual, 4, False),
    blocks_that_run_twice: (Residual, 8, False),
    a_repeated_block: (Residual, 4, False),
    a_skipped_block: (Residual, 3, False),
    blocks_in_reverse_order: (Residual, 4, False),
    a_weight_used_before_the_chain: (Residual, 4, True),
    a_weight_used_after_the_chain: (Residual, 4, True),
    a_penalty_on_weights: (Residual, 4, True),
    a_loss_on_the_first_blocks_input: (Residual, 4, True),
    a_loss_on_every_state: (Residual, 4, True),
    only_an_auxiliary_loss: (Residual, 4, True),
    the_taps_backward_first: (Residual, 4, True),
    the_last_states_backward_first: (Residual, 4, True),
    a_tap_of_a_graph_that_is_freed: (Residual, 4, True),
    two_losses_of_one_pass: (Residual, 4, True),
    a_graph_retained_twice: (Residual, 4, True),
    two_passes_of_one_loss: (Residual, 4, True),
    two_passes_in_turns: (Residual, 4, True),
    a_pass_that_is_dropped: (Residual, 4, True),
    a_state_that_retains_its_gradient: (Residual, 4, False),
    a_state_that_retains_its_gradient_after_the_pass: (Residual, 4, False),
    a_hook_that_changes_the_gradient_of_a_state: (Residual, 4, False),
    a_hook_after_blocks_that_return_their_input: (Handing, 4, False),
    the_gradient_of_a_state: (Residual, 4, False),
    the_gradient_of_the_last_state: (Residual, 4, False),
    the_gradient_of_a_last_state_with_extra_outputs: (Returning, 4, False),
    a_loss_on_extra_outputs: (Returning, 4, False),
    a_refused_gradient_of_a_state_and_then_backward: (Residual, 4, True),
    the_gradient_of_some_parameters: (Residual, 4, True),
    all_blocks_frozen: (Residual, 4, True),
    everything_frozen_but_one_block: (Residual, 4, True),
    everything_frozen_but_the_head: (Residual, 4, True),
    a_block_frozen_after_the_pass: (Residual, 4, True),
    a_detached_state: (Residual, 4, False),
    a_state_that_skips_two_blocks: (Residual, 4, False),
    a_chain_in_branches: (Residual, 4, False),
    an_input_that_first_appears_after_the_first_block: (Given, 4, False),
    the_state_before_as_another_input: (Given, 4, False),
    the_first_state_as_an_input_of_every_block: (Given, 4, False),
    a_parameter_from_a_closure: (Closed, 4, False),
    a_tensor_with_a_history_from_a_closure: (Closed, 4, False),
    an_older_state_from_a_closure: (Closed, 4, False),
    a_weight_of_another_block_from_a_closure: (Closed, 4, False),
    a_change_in_place_between_blocks: (Residual, 4, False),
    a_change_in_place_of_a_state_that_is_needed: (Residual, 4, False),
    a_change_in_place_of_a_weight: (Residual, 4, False),
}
OVER_OTHER_BLOCKS = {
    "blocks that begin with a ReLU in place": (the_usual_pass, InPlace),
    "taps of blocks that begin with a ReLU in place": (a_loss_on_every_state, InPlace),
    "a reentrant checkpoint inside blocks": (the_usual_pass, Reentrant),
    "taps of blocks with a reentrant checkpoint inside": (a_loss_on_every_state, Reentrant),
    "two losses over a reentrant checkpoint inside blocks": (two_losses_of_one_pass, Reentrant),
}
PASSES = {
    **{run.__name__.replace("_", " "): (run, *rest) for run, rest in CHAINS.items()},
    **{name: (run, block, LENGTH, False) for name, (run, block) in OVER_OTHER_BLOCKS.items()},
}
REFUSED = {
    "a state that retains its gradient after the pass": "retain_grad",
    "a hook that changes the gradient of a state": "gradient hook",
    "the gradient of a state": "only a part of that gradient",
    "the gradient of a last state with extra outputs": "only a part of that gradient",
    "a tensor with a history from a closure": "neither an argument",
    "an older state from a closure": "neither an argument",
    "blocks that begin with a ReLU in place": "modifies its input in place",
    "taps of blocks that begin with a ReLU in place": "modifies its input in place",
    "a reentrant checkpoint inside blocks": "use_reentrant=True",
    "taps of blocks with a reentrant checkpoint inside": "use_reentrant=True",
    "two losses over a reentrant checkpoint inside blocks": "use_reentrant=True",
}
"""Passes that are refused, and words of the message."""
SPLIT = {
    "an operation between two runs of blocks": "its input is computed by the model, a hook or a reentrant checkpoint",
    "a chain in branches": "another block has used the output of the block before it: the blocks branch",
    "the state before as another input": "it gets a tensor of shape (3, 6) that needs a gradient",
    "a state that retains its gradient": "the state before it has a gradient hook or retain_grad()",
    "the usual pass": "",
    "a loss on every state": "",
    "a repeated block": "",
}
"""Why a block starts another chain; ``""`` if none does."""
