"""How long the work of an engine, a trainer and a weight store takes: pure models in closed form."""
