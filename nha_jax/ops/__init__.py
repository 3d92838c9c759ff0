"""The Native Hybrid Attention operator: one softmax over memory slots and a window of tokens."""
