"""Classify time series with a scikit-learn estimator.

Series of one channel are sine waves of two frequencies in noise.
"""

import numpy as np

from primal_attention.tasks.timeseries import PrimalTimeSeriesClassifier

rng = np.random.default_rng(0)
labels = np.array(["slow", "fast"])[np.arange(120) % 2]
frequency = np.where(labels == "slow", 2.0, 5.0)[:, None, None]
time = np.linspace(0, 2 * np.pi, 60)
series = np.sin(frequency * (time + rng.uniform(0, 6, (120, 1, 1))))  # [cases channels length]
series += 0.3 * rng.normal(size=series.shape)

model = PrimalTimeSeriesClassifier(n_steps=100, random_state=0).fit(series[:80], labels[:80])
print(f"accuracy on new series: {model.score(series[80:], labels[80:]):.2f}")
