"""Compare the spectra of attention layers: how many directions does each one use?

Both models have random weights; put your trained ones in their place.
"""

import torch

from primal_attention.analysis import layer_spectra, spectrum_summary
from primal_attention.models import EncoderClassifier, EncoderConfig

x = torch.randn(4, 100, 3)
for attention in ("softmax", "primal"):
    torch.manual_seed(0)
    config = EncoderConfig(num_classes=2, num_features=3, dim=32, attention=attention)
    spectra = layer_spectra(EncoderClassifier(config).eval(), x)
    for layer in spectra:
        sigma = layer.singular_values.mean((0, 1))
        print(f"{attention}, {layer.name}: first of Σσ {sigma[0] / sigma.sum():.0%}")
    print(f"{attention}: {spectrum_summary(spectra)}")
