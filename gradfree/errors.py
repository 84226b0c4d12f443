"""``ChainError``, and the table of the refusals that several engines or kinds of chain share: case, message, remedy.

Most refusals that one place makes stand there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class ChainError(RuntimeError):
    """Raised for a model, or a pass of it, for which an engine cannot compute correct gradients."""


def refuse(problems: Iterable[str]) -> None:
    """Raise for the first of ``problems``, if there is one.

    Raises:
        ChainError: with the problem as its message.
    """
    for problem in problems:
        raise ChainError(problem)


REFUSALS: dict[str, list[Refusal]] = {}
"""The rows, by family."""


@dataclass(frozen=True)
class Refusal:
    """One row of a table.

    Attributes:
        case: the refused case, for the documentation.
        why: the message, with names in braces.
        remedy: the end of the message.
    """

    case: str
    why: str
    remedy: str

    def message(self, **names: object) -> str:
        """Return the whole message with ``names`` in place of the braces."""
        return f"{self.why} {self.remedy}".format(**names)

    def error(self, **names: object) -> ChainError:
        """Return the error with this message."""
        return ChainError(self.message(**names))


def _row(family: str, case: str, why: str, remedy: str) -> Refusal:
    row = Refusal(case, why, remedy)
    REFUSALS.setdefault(family, []).append(row)
    return row


_PASSES = "Passes"

SECOND_DERIVATIVES = _row(
    _PASSES,
    "second derivatives, `create_graph=True`",
    "create_graph=True: an engine's gradients have no derivatives.",
    "Detach the handle, or use engine='backprop' in scan, for the passes that need second derivatives (gradient "
    "penalties).",
)
TRANSFORM = _row(
    _PASSES,
    "a transform of `torch.func`",
    "{where} runs inside a transform of torch.func (grad, vmap, jvp, ...), which engines do not support.",
    "Detach the engine for it, or call loss.backward() or torch.autograd.grad.",
)
OTHER_PASS = _row(
    _PASSES,
    "`torch.jit.trace`, forward-mode differentiation, compiled autograd",
    "{where} runs in {other}, which engines do not support.",
    "Detach the engine for it: handle.detach().",
)
MANY_COTANGENTS = _row(
    _PASSES,
    "many cotangents at once, `is_grads_batched=True`",
    "the backward pass through {where} is run for many cotangents at once (is_grads_batched=True, vectorize=True), "
    "which engines do not support.",
    "Run it for one cotangent after the other, or detach the engine.",
)
CHANGED_IN_PLACE = _row(
    _PASSES,
    "changes in place between the passes",
    "the input, the initial state, the weights or the output of {where} were changed in place between the forward and "
    "the backward pass, which needs them.",
    "Use the out-of-place operation (out = out + x, not out += x), and step the optimizer after the backward pass.",
)
SETTINGS_CHANGED = _row(
    _PASSES,
    "a setting that changes between the passes, where blocks or a cell run again in the backward pass",
    "{path} may compute something else in the backward pass, which runs it again in a batch, than in the forward pass: "
    "a setting that it reads has changed in between, or another part of an object that it holds, or it reads the "
    "batch's size or values.",
    "Change settings after the backward pass. For blocks, attach with batched=False; a CellLayer takes 'shooting' or "
    "'backprop'.",
)
CHUNK_TWICE = _row(
    _PASSES,
    "a chunk of a stream that is solved twice",
    "{path} gets a second backward pass through one chunk of a stream (retain_graph=True), or is part of a block that "
    "another engine runs backward several times: the second pass would carry nothing to the next chunk.",
    "Add the losses and call backward() once for each chunk; keep the layer out of the other engine's chains.",
)
NO_LESSON = _row(
    _PASSES,
    "an engine that learns from targets or from the loss itself, without them",
    "{engine} needs the {what} of the batch, not only the gradient of the loss.",
    "Run the backward pass inside `with handle.lesson({what}={given}):`, with {given} {meaning}. In Lightning, handle "
    "is `self.trainer.strategy.handle`, in a `training_step` with manual optimization; the strategy itself gives the "
    "targets of batches (inputs, targets). With Hugging Face's Trainer it is `callback.handle`, in a `training_step` "
    "of yours.",
)
NOT_FINITE_BEHIND = _row(
    _PASSES,
    "NaN or inf after a chain, under `detect_anomaly`",
    "non-finite cotangent at the output of {where}:",
    "NaN or inf comes from a module after it, or from the loss.",
)
NOT_FINITE_INSIDE = _row(
    _PASSES,
    "NaN or inf inside a layer, under `detect_anomaly`",
    "non-finite gradient in {where}:",
    "NaN or inf is in its input, its initial state or its weights, or comes from an overflow.",
)

STEP_CHANGED = _row(
    _PASSES,
    "a step of `scan` or a cell that changes between its runs",
    "{name} {what}, so that its steps cannot run in segments.",
    "Return what it keeps as a part of y and change nothing else, bind variables that change after the call (def "
    "step(h, x, layer=layer)), or use engine='backprop'.",
)

_MODULES = "Modules of a chain"

ATTACHED = _row(
    _MODULES,
    "a second engine",
    "{path} has an engine attached already:",
    "call detach() on its handle or EngineOptimizer.",
)
BACKWARD_HOOKS = _row(
    _MODULES,
    "full backward hooks",
    "{path} has full backward hooks: they would see partial cotangents, some of them several times.",
    "Remove them while an engine is attached.",
)
FORWARD_HOOKS = _row(
    _MODULES,
    "forward hooks in the cell of a `CellLayer`",
    "{path} has forward hooks: an engine runs the cell without a graph, so tensors in the hooks have no gradient.",
    "Remove them while an engine is attached.",
)
GLOBAL_HOOKS = _row(
    _MODULES,
    "hooks on all modules, with a `CellLayer`",
    "there is a global hook on all modules (torch.nn.modules.module.register_module_forward_hook, a counter of FLOPs), "
    "which would run on {path}: an engine runs the cell without a graph, so tensors in the hook have no gradient.",
    "Remove it for passes with a graph, or detach the engine.",
)
HOOKED_STATE = _row(
    _MODULES,
    "a gradient hook or `retain_grad()` on what a cell of a `CellLayer` is given",
    "{path} puts a gradient hook, or retain_grad(), on its state or its input: an engine runs the cell on all steps as "
    "one batch, where it would see other gradients, or none.",
    "To clip inside the recurrence, put the hook on a copy, h = h.view_as(h), if h.requires_grad. It gets the "
    "gradients of all steps at once, so let it work element by element: lambda g: g.clamp(-1, 1).",
)
CHANGED_STATE = _row(
    _MODULES,
    "a cell of a `CellLayer` that changes what it is given",
    "{path} changes its input, its state, a parameter or a buffer: an engine runs it again in the backward pass, which "
    "would change them once more.",
    "Compute new tensors instead, and keep statistics outside of the cell.",
)
HOOK_WITHOUT_GRAPH = _row(
    _MODULES,
    "a gradient hook without a condition in the cell of a `CellLayer`",
    "{path} puts a gradient hook, or retain_grad(), on a tensor that needs no gradient: an engine runs the cell "
    "without a graph first.",
    "Write `if h.requires_grad: h.register_hook(...)`, and put it on no tensor that the cell is given.",
)
RANDOM_CELL = _row(
    _MODULES,
    "dropout and batch normalisation in the cell of a `CellLayer`",
    "{path} is a {kind}: an engine runs the cell again in the backward pass, which would draw other masks or count "
    "statistics twice.",
    "Put it outside the cell.",
)
HIDDEN_PARAMETER = _row(
    _MODULES,
    "a custom autograd function that may compute gradients of parameters by itself, as a checkpoint of one's own does",
    "{path} has the custom autograd function {function}, and its graph does not lead to the parameter '{name}'. If the "
    "function's backward computes that gradient by torch.autograd.backward(), as a checkpoint of one's own does, an "
    "engine would run it several times and add them up.",
    "Use torch.utils.checkpoint with use_reentrant=False, or give the parameters to the function and return their "
    "gradients; freeze those that this pass does not use. Or name other chains: chains=[...].",
)
SHARDED = _row(
    _MODULES,
    "blocks that FSDP shards by themselves",
    "{path} is sharded by FSDP and lies inside a chain: its parameters would get no gradient.",
    "Shard the chain as a whole, or the model: fully_shard(model).",
)
CALLS_ITSELF = _row(
    _MODULES,
    "a block that calls itself",
    "{path} calls itself: a link of a chain cannot contain another link.",
    "Put what it does twice into another module, which the block calls, or leave the block out of the chain. If Ctrl-C "
    "has interrupted a call of it, detach the engine and attach it again.",
)
WEIGHT_WITH_STATE = _row(
    _MODULES,
    "spectral norm, where an engine runs layers twice",
    "{path} computes its weight with a state that it changes (a power iteration), which would run twice with {engine}.",
    "Use a plain weight, or an engine that runs each layer once, such as 'foton' with streaming=False.",
)
MIXES = _row(
    _MODULES,
    "blocks that mix samples, with `deeppcr` and `forward_gradient`",
    "{path} mixes the samples of a batch, as batch normalization does in training: it has no Jacobian for each of "
    "them.",
    "Use another normalization, eval() for that module, a batch in the first dimension of the states if there is none, "
    "or the engine 'backprop'.",
)
COMPLEX_JACOBIAN = _row(
    _MODULES,
    "complex states, with `deeppcr`, and with `snap` in a `CellLayer`",
    "{path} has complex states: a step that is not holomorphic has no matrix of complex numbers as its Jacobian.",
    "Use real states with twice the units, or the engine 'backprop'.",
)
SCRIPTED = _row(
    _MODULES,
    "scripted modules",
    "{path} contains a scripted module, which hides its graph from Python.",
    "Use the eager module.",
)
LAZY = _row(
    _MODULES, "lazy parameters", "{path} has uninitialised lazy parameters:", "run the model once, then attach."
)

_BATCHES = "Equal blocks that run backward in a batch"

STORED_IN_ROW = _row(
    _BATCHES,
    "blocks that store or count something as they run",
    "the blocks from {path} on have stored or counted something while they ran. They run backward in a batch, which "
    "would repeat that, and a loss on a stored tensor would have no gradient.",
    "Attach with batched=False.",
)
_RANKS = "Blocks on ranks"
_ELSEWHERE = (
    "Across ranks, modules after the blocks may use the last block's output, and weights that no module before the "
    "blocks uses. If forward cannot be traced (torch.fx), register modules in the order in which they run."
)

SHARED_WEIGHT = _row(
    _RANKS,
    "one weight on several ranks, such as an embedding that is the head, too",
    "{first} and {second} are one weight, which would be on two ranks.",
    "Untie them: give one of them a copy. Or train on one rank.",
)

INPUT_WITH_GRADIENT = _row(
    _RANKS,
    "inputs that need a gradient",
    "the model gets a tensor of shape {shape} that needs a gradient, which only the first rank would get.",
    "Move the modules that compute it into the model, detach it, or run the model under torch.no_grad().",
)
BETWEEN = _row(
    _RANKS,
    "anything computed between blocks",
    "{path} does not get the output of the block before it: across ranks nothing may be computed between blocks, and "
    "hooks may not replace their outputs.",
    "Move the computation into a block.",
)
BLOCK_ORDER = _row(
    _RANKS,
    "blocks in another order, twice, or left out",
    "{path} does not run in its turn: across ranks each block runs once, in order.",
    "Put them in the order in which they run, call them (not their forward), and let a block that does nothing return "
    "its input.",
)
NO_STATE = _row(
    _RANKS,
    "a first argument that is no tensor",
    "the first argument of {path} is no tensor.",
    "If another one is the state, say so with gradfree.register_port.",
)
NESTED = _row(
    _RANKS,
    "nested tensors",
    "{path} gets a nested tensor, which cannot be sent to other ranks.",
    "nn.TransformerEncoder makes them in evaluation: pass it enable_nested_tensor=False.",
)
SECOND_INPUT = _row(
    _RANKS,
    "a second input that needs a gradient",
    "{path} gets a second tensor that needs a gradient, besides its state; other ranks would not return that gradient.",
    "Detach it, or compute it in the block.",
)
SECOND_OUTPUT = _row(
    _RANKS,
    "tensors returned besides the state",
    "{path} returns tensors besides its state, which are not sent to other ranks.",
    "Let it return only its state.",
)
ELSEWHERE = _row(
    _RANKS,
    "the use of a value on another rank",
    "{what} depends on {name}, which is on another rank.",
    _ELSEWHERE,
)
NAN_FROM_ELSEWHERE = _row(
    _RANKS,
    "NaN in a first pass",
    "{what} is NaN in its first pass: the model or its input is wrong, or it depends on a value on another rank.",
    _ELSEWHERE,
)
NO_OUTPUT = _row(
    _RANKS,
    "outputs in an object of another kind",
    "the model returns a {kind}, in which no tensors are found: other ranks would get no gradients.",
    "Return tensors in a tuple, a dictionary or a dataclass.",
)
LOSS_ELSEWHERE = _row(
    _RANKS,
    "a loss on the output of an inner block",
    "the loss depends on the output of {path} not only by the next block. It is on another rank.",
    _ELSEWHERE,
)
EXACT_ON_RANKS = _row(
    _RANKS,
    "comparisons with exact gradients: `GradientWatch`, `handle.exactly()`",
    "{path}: across ranks an engine's gradients cannot be compared with exact ones (GradientWatch, handle.exactly()).",
    "Compare them on one rank. With as many iterations as there are borders between ranks they are exact.",
)
