"""Find emoji by their names: learn from two drawing styles, search in the third.

Takes two minutes of one core. Needs PRIMAL_DATA with multimodal/emoji. Losses may be named:
python examples/search_emoji.py itc itm mlm mfr
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch

from primal_attention.tasks.pairs import ImageTextMatcher

torch.set_num_threads(1)
emoji = np.load(Path(os.environ["PRIMAL_DATA"]) / "multimodal" / "emoji" / "emoji32.npz")
names = [str(name) for name in emoji["text"]]

losses = tuple(sys.argv[1:]) or ("itc", "itm")
matcher = ImageTextMatcher(options={"objectives": losses}, random_state=0)
matcher.fit(np.concatenate([emoji["color"], emoji["twemoji"]]), names + names, time_limit=110)

for score, value in matcher.evaluate(emoji["black"], names).items():
    print(f"{score}: {100 * value:.1f} %")
matcher.index(emoji["black"])
for text in ("red apple", "cat face", "smiling face"):
    print(f"{text}: {', '.join(names[hit.index] for hit in matcher.search(text, k=5))}")
