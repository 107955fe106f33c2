"""Give a Hugging Face model another attention, and its own one back.

By default it becomes adaptive: softmax on short inputs, and close to it on long ones. The model is
a small BERT with random weights; one from the hub is converted the same way.
"""

import torch
from transformers import BertConfig, BertModel

from primal_attention.surgery import SurgeryConfig, convert, revert

torch.manual_seed(0)
config = BertConfig(
    vocab_size=100,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=2000,
)
model = BertModel(config).eval()
ids = torch.randint(100, (1, 2000))
with torch.no_grad():
    before = model(ids).last_hidden_state
    for settings in (SurgeryConfig(), SurgeryConfig("nystromformer", layers="last:2")):
        conversion = convert(model, settings)
        after = model(ids).last_hidden_state
        cosine = torch.cosine_similarity(before, after, -1).mean()
        print(f"mean cosine with {settings.attention} attention: {cosine:.4f}")
        revert(model, conversion)
    print(f"the same after the way back: {torch.equal(before, model(ids).last_hidden_state)}")
