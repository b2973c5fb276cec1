"""The methods, one file each: vote, sample, laplace, swag, snapshot, sculpt, neo."""
