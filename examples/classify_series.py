"""Classify time series with an aeon estimator, and see which of its parts decide.

Series of one channel are sine waves of two frequencies in noise. Their lengths differ, and a tenth
of the values is missing.
"""

import numpy as np

from primal_attention.tasks.series import SeriesClassifier

rng = np.random.default_rng(0)
labels = np.array(["slow", "fast"])[np.arange(120) % 2]
series = []
for label in labels:
    time = np.arange(rng.integers(50, 70)) * 0.1 + rng.uniform(0, 6)
    wave = np.sin((2.0 if label == "slow" else 5.0) * time) + 0.3 * rng.normal(size=len(time))
    wave[rng.random(len(time)) < 0.1] = np.nan
    series.append(wave[None])  # [channels length]

model = SeriesClassifier(random_state=0).fit(series[:80], labels[:80])
print(f"accuracy on new series: {model.score(series[80:], labels[80:]):.2f}")
print({part: round(share, 2) for part, share in model.shares_.items()})
