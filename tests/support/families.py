"""A tiny configuration of every family of encoders that is tested, with what sets it apart."""

_SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_PLAIN = {**_SHAPE, "max_position_embeddings": 40}
_DISTANCES = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
PACKED = {
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "bert", "nomic_bert"), _PLAIN),
    # Local layers see 2 tokens to each side.
    "modernbert": {**_PLAIN, "local_attention": 4, "global_attn_every_n_layers": 2},
    "eurobert": {**_PLAIN, "num_key_value_heads": 2, "mask_token_id": 63, "bos_token_id": 0, "eos_token_id": 2},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 40},
    **{family: {**_PLAIN, "embedding_size": 8} for family in ("electra", "albert")},
}
PADDED = {
    "mpnet": _PLAIN,
    "deberta-v2": {**_PLAIN, **_DISTANCES, "norm_rel_ebd": "layer_norm"},
    # It pads every span once more, to a multiple of its window.
    "longformer": {**_PLAIN, "attention_window": [8, 8], "max_position_embeddings": 80},
}
# Approximate attention, Fourier transforms, convolutions and pooling over a row: padding changes what they compute.
REFUSED = {"nystromformer": _PLAIN, "fnet": _PLAIN, "convbert": {**_PLAIN, "embedding_size": 8}, "yoso": _PLAIN}
# Nothing of these is a masked language model of an encoder.
_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2}
OTHERS = {"gpt2": _GPT, "qwen2": _SHAPE, "bart": {"d_model": 16}, "t5": {"d_model": 16}}
TRAINED = PACKED | PADDED
