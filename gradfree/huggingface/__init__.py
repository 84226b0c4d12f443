"""Engines in Hugging Face's Trainer; ``import gradfree.huggingface`` needs transformers and accelerate.

``Trainer(model, args, train_dataset=data, callbacks=[EngineCallback("highway_bp", iterations=2)])``
"""

from gradfree.extras import needs_extra

with needs_extra("huggingface"):
    from gradfree.huggingface.callback import EngineCallback

__all__ = ["EngineCallback"]
