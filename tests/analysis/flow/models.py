"""Small random models of transformers in the shapes of known vision-and-language models."""

import pytest
import torch

WORDS, IMAGE_TOKEN = 7, 39


def randomize(model):
    """Return the model with weights so large that attention is far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    return model.eval()


def _text():
    mask = torch.ones(2, WORDS, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.randint(3, 38, (2, WORDS)), "attention_mask": mask}


def _vision():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return {**sizes, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}


def _encoder():
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {**sizes, "intermediate_size": 32, "max_position_embeddings": 20}


def vilt(head=None):
    tf = pytest.importorskip("transformers")
    config = tf.ViltConfig(**_encoder(), image_size=16, patch_size=4, max_image_length=-1)
    mask = torch.ones(2, 16, 16, dtype=torch.long)
    mask[1, :, 8:] = 0
    images = {"pixel_values": torch.randn(2, 3, 16, 16), "pixel_mask": mask}
    return randomize((head or tf.ViltModel)(config)), {**_text(), **images}


def visual_bert():
    tf = pytest.importorskip("transformers")
    config = tf.VisualBertConfig(**_encoder(), visual_embedding_dim=6)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    images = {"visual_embeds": torch.randn(2, 4, 6), "visual_attention_mask": mask}
    return randomize(tf.VisualBertModel(config)), {**_text(), **images}


def lxmert():
    tf = pytest.importorskip("transformers")
    sizes = _encoder()
    del sizes["num_hidden_layers"]
    config = tf.LxmertConfig(**sizes, l_layers=1, x_layers=2, r_layers=1, visual_feat_dim=6)
    images = {
        "visual_feats": torch.randn(2, 4, 6),
        "visual_pos": torch.rand(2, 4, 4),
        "visual_attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
    }
    return randomize(tf.LxmertModel(config)), {**_text(), **images}


def blip():
    tf = pytest.importorskip("transformers")
    text = {**_encoder(), "encoder_hidden_size": 16, "bos_token_id": 1, "sep_token_id": 2}
    config = tf.BlipConfig(text_config=text, vision_config=_vision(), projection_dim=8)
    images = {"pixel_values": torch.randn(2, 3, 16, 16)}
    return randomize(tf.BlipForImageTextRetrieval(config)), {**_text(), **images}


def clip():
    tf = pytest.importorskip("transformers")
    text = {**_encoder(), "bos_token_id": 1, "eos_token_id": 2}
    config = tf.CLIPConfig(text_config=text, vision_config=_vision(), projection_dim=8)
    batch = _text()
    batch["input_ids"][:, -1] = 2
    return randomize(tf.CLIPModel(config)), {**batch, "pixel_values": torch.randn(2, 3, 16, 16)}


def llava(**changes):
    tf = pytest.importorskip("transformers")
    text = tf.LlamaConfig(**_encoder(), num_key_value_heads=1, bos_token_id=1, eos_token_id=2)
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**_vision()),
        text_config=text,
        image_token_id=IMAGE_TOKEN,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
    )
    words = torch.randint(3, 38, (2, 11))
    words[:, 0], words[:, 2:6] = 1, IMAGE_TOKEN
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 9:] = 0
    batch = {"input_ids": words, "attention_mask": mask}
    model = tf.LlavaForConditionalGeneration(config)
    return randomize(model), {**batch, "pixel_values": torch.randn(2, 3, 16, 16), **changes}


def qwen2_vl():
    """Return a decoder whose images are laid end to end, with tokens around each image."""
    tf = pytest.importorskip("transformers")
    text = {**_encoder(), "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    text["rope_parameters"]["rope_theta"] = 1e4
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2}
    config = tf.Qwen2VLConfig(
        text_config=text,
        vision_config={**vision, "patch_size": 4, "spatial_merge_size": 2},
        image_token_id=IMAGE_TOKEN,
        video_token_id=38,
        vision_start_token_id=36,
        vision_end_token_id=37,
    )
    words = torch.randint(3, 30, (2, 10))
    words[:, 1], words[:, 2:6], words[:, 6] = 36, IMAGE_TOKEN, 37
    batch = {
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "pixel_values": torch.randn(32, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (words == IMAGE_TOKEN).int(),
    }
    return randomize(tf.Qwen2VLForConditionalGeneration(config)), batch


def pali_gemma():
    """Return a decoder whose prefix, image and question, sees itself in both directions."""
    tf = pytest.importorskip("transformers")
    text = {**_encoder(), "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8}
    vision = {**_vision(), "model_type": "siglip_vision_model", "vision_use_head": False}
    config = tf.PaliGemmaConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        image_token_index=IMAGE_TOKEN,
        projection_dim=16,
    )
    words = torch.randint(4, 38, (2, 10))
    words[:, :4] = IMAGE_TOKEN
    batch = {
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "pixel_values": torch.randn(2, 3, 16, 16),
        "token_type_ids": torch.tensor([[0] * 7 + [1] * 3] * 2),
    }
    return randomize(tf.PaliGemmaForConditionalGeneration(config)), batch
