"""Draft heads: small models that read the target's hidden states and guess its next tokens.

`reading.read` converts every dialect of published heads to one normal form; `kinds` has the forward
of each kind. Needs torch.
"""
