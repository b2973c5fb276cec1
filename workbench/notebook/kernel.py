"""Program of the kernels that run reports: like `python -m ipykernel_launcher`, but its kernels end without waiting for resource trackers."""

import sys
from typing import Any


def _is_tracker(process: Any) -> bool:
    import psutil

    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:  # it has ended
        return False


def main() -> None:
    """Run a kernel with the connection file of the command line."""
    from ipykernel.ipkernel import IPythonKernel
    from ipykernel.kernelapp import IPKernelApp

    class Kernel(IPythonKernel):
        # When it is shut down, a kernel ends its child processes before it exits. The trackers of multiprocessing and joblib, which remove what
        # other processes leave behind, ignore that and end after the kernel. It would wait until it is killed, without its exit handlers.
        def _process_children(self) -> list[Any]:
            return [child for child in super()._process_children() if not _is_tracker(child)]

    IPKernelApp.launch_instance(kernel_class=Kernel)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose modules are no modules of the notebook
    main()
