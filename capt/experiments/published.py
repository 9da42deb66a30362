"""Published numbers of CaPT (arXiv 2510.16670), to stand beside what is measured.

Only what could be read in a source at hand is here: the abstract's average and the trained shares. Every other place of
a table stays empty, and is filled by adding to :data:`SCORES`.
"""

from __future__ import annotations

#: (model_type, layers, width) of the published bases.
BASES = {
    ("t5", 12, 768): "T5-Base",
    ("t5", 24, 1024): "T5-Large",
    ("llama", 16, 2048): "Llama-3.2-1B",
    ("qwen2", 28, 1536): "Qwen2.5-1.5B",
}

#: (table, base, row's label, task or "average") -> score in percent.
SCORES: dict[tuple[str, str, str, str], float] = {("1", "T5-Large", "CaPT", "average"): 84.03}

#: (base, row's label) -> percent of the parameters that trains.
TRAINED = {
    ("T5-Base", "CaPT"): 0.004,
    ("T5-Large", "CaPT"): 0.003,
    ("Llama-3.2-1B", "CaPT"): 0.003,
    ("Qwen2.5-1.5B", "CaPT"): 0.003,
}
