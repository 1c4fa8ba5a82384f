"""Floor 4: what a final state is worth. Verifiers that judge it, advantages that compare the judgements."""
