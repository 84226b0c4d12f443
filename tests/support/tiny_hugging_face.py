"""Tiny Hugging Face models with random weights, and their training by the Trainer."""

import logging

import torch
import transformers
from transformers import Trainer, TrainingArguments

WORDS, LENGTH = 50, 12


def quiet():
    """Silence the library's warnings about unusual configurations."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def gpt2(**options):
    quiet()
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": WORDS, "n_positions": LENGTH}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options))


def bert(**options):
    """A post-norm model, whose skip connections change during training."""
    quiet()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=WORDS, **options))


def mixtral():
    """A model with a loss on the router logits, which hooks of the library collect inside blocks."""
    quiet()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = transformers.MixtralConfig(**sizes, **experts, num_key_value_heads=2, vocab_size=WORDS)
    return transformers.MixtralForCausalLM(config)


def bart():
    """A model with encoder and decoder."""
    quiet()
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _PART.items()}
    config = transformers.BartConfig(**sizes, d_model=32, vocab_size=WORDS, max_position_embeddings=LENGTH, **_TOKENS)
    return transformers.BartForConditionalGeneration(config)


_PART = {"layers": 3, "attention_heads": 4, "ffn_dim": 64}
_TOKENS = {"pad_token_id": 1} | dict.fromkeys(["eos_token_id", "decoder_start_token_id", "forced_eos_token_id"], 2)


def vit():
    quiet()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    shape = {"image_size": 8, "patch_size": 4, "num_labels": 5, "hidden_dropout_prob": 0.1}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **shape))


class Examples(torch.utils.data.Dataset):
    """64 fixed examples for one of the models."""

    def __init__(self, model):
        self.images = model.main_input_name == "pixel_values"

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.images:
            values = torch.linspace(index, index + 9, 3 * 8 * 8, dtype=torch.float32).sin()
            return {"pixel_values": values.reshape(3, 8, 8), "labels": index % 5}
        tokens = torch.arange(index, index + LENGTH) * 7 % WORDS
        return {"input_ids": tokens, "labels": tokens}


def train(model, folder, callbacks=(), steps=6, resume=None, **options):
    """Train ``model`` on batches of four; return the Trainer."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **({"learning_rate": 1e-3, "logging_steps": 2, "save_strategy": "no"} | options),
    )
    data = Examples(model)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(model):
    """Return all weights as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
