"""From a model to a graph of layers, and from the graph to pieces of it."""
