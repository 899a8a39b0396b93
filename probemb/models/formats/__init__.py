"""Models in the layouts of others: open_clip, and the published weights of PCME++ and ProLIP."""
