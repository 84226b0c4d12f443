"""What lies around a call: a checkpoint, or what is compiled."""

from gradfree.torchside.private import checkpointed as checkpointed
from gradfree.torchside.private import is_compiled_around as is_compiled_around
from gradfree.torchside.private import recomputed as recomputed
from gradfree.torchside.private import uncompiled as uncompiled
