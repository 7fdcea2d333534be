"""`python -m lily_mlx.doctor`."""

from lily_mlx.doctor import main

main()
