"""Search sentences of film reviews by their embeddings, and order the results anew.

A result is right if it comes from the same review. The re-ranker never saw a text: it knows the
order of the results and their similarities. Needs PRIMAL_DATA with text/imdb.
"""

import numpy as np

from primal_attention.datasets.lists import search_all
from primal_attention.tasks.lists import Reranker, mean_average_precision
from primal_studies.kit.pretrained import embed, minilm
from primal_studies.lists.pretrained import review_sentences

texts, reviews = review_sentences(reviews=60, sentences=6)
model, tokenizer = minilm()
options = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
batches = [dict(tokenizer(texts[i : i + 32], **options)) for i in range(0, len(texts), 32)]
x = embed(model, batches).numpy()

xq, xb, ids, relevant = search_all(x, np.asarray(reviews), results=100)
better = Reranker.pretrained().rerank(xq, xb, ids).ids
gains = [np.isin(new[:5], r).sum() - np.isin(old[:5], r).sum()
         for new, old, r in zip(better, ids, relevant, strict=True)]  # fmt: skip
query = int(np.argmax(gains))
print(f"query: {texts[query]}")
for name, row in (("before", ids[query]), ("after", better[query])):
    print(f"\n{name}:")
    for i in row[:5]:
        print("  same review " if i in relevant[query] else "              ", texts[i][:80])
print(f"\nmAP before: {mean_average_precision(ids, relevant):.3f}")
print(f"mAP after: {mean_average_precision(better, relevant):.3f}")
