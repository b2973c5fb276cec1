"""The four methods, one file each: vote, sample, sculpt, neo."""
