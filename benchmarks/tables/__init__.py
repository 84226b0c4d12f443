"""What figures are made into: facts, tables, sentences, plots."""
