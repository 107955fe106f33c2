"""Files: each format is read in one place, with limits, and never runs code.

    read_text, read_lines, open_text     UTF-8, plain or compressed
    read_json, read_json_lines           values of JSON
    read_yaml                            settings
    read_array, read_arrays, list_arrays .npy and .npz
    read_text_rows                       texts of any file, row by row, larger than the memory
    take_arrays                          arrays of an .npz that must be of a certain sort
    read_tensors                         .safetensors
    SealedFolder, save_sealed            folders whose bytes are checked, saved whole or not at all
    new_folder                           folders that are replaced whole or not at all
    locked                               folders with one writer

Whatever is wrong with a file is a :class:`~primal_attention.support.command.UserError`, one
sentence that begins with the file's name. The first lines import neither numpy nor torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
