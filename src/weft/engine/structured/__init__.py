"""Constrained answers: grammars of schemas, expressions and choices, and the masks of tokens that follow from them."""
