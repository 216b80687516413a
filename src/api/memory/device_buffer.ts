/** Device memory. */
import { MemoryBuffer } from "./buffer.ts";
import type { DType } from "./dtype.ts";
import { TensorView, type TensorViewOptions } from "./tensor_view.ts";

/**
 * Device memory of a fixed size: a reservation of its own (`device.createBuffer`) or a block of a pool (`pool.alloc`).
 * Its content is undefined until something is written.
 */
export class DeviceBuffer extends MemoryBuffer {
  /**
   * The memory as a tensor.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * await using device = await Device.open("cpu");
   * using buffer = device.createBuffer(4096);
   * const wide = buffer.as("bf16", [4, 8], { pitch: 64 }); // 4 rows of 8, 64 elements apart
   * console.log(String(wide), wide.dense);
   * ```
   *
   * @param dtype Element type.
   * @param shape Sizes, outermost first, each at least 1.
   * @param options Where the tensor lies in the buffer.
   * @returns A view that owns nothing.
   * @throws {LoramemError} `BAD_ARGUMENT` where it would leave the buffer.
   */
  as(dtype: DType, shape: readonly number[], options: TensorViewOptions = {}): TensorView {
    return new TensorView(this, dtype, shape, options);
  }
}
