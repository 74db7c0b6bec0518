"""Drafter: the DFlash model, its mask, anchors and loss; decoding with it; its export."""
