// The resources of a run from `commtrace view`. One that is not ready yet is asked for again until it is.

import { type Columns, decodeColumns } from "./columns";
import type { Source } from "./source";

export interface Progress {
  text: string;
  done: number;
  of: number; // 0 where it is not known
}

const AGAIN_AFTER = 300; // ms

export class ServerSource implements Source {
  readonly isWhole = false;
  private awaited = 0; // resources

  constructor(
    private readonly base: string, // address of the data, which ends with a slash
    private readonly token: string,
    private readonly onProgress: (progress: Progress | null) => void,
  ) {}

  async json<Data>(name: string): Promise<Data | null> {
    const response = await this.ready(name);
    return response && ((await response.json()) as Data);
  }

  async table(name: string, ranks?: readonly number[]): Promise<Columns | null> {
    const response = await this.ready(ranks ? `${name}?ranks=${rangesOf(ranks)}` : name);
    return response && decodeColumns(new Uint8Array(await response.arrayBuffer()));
  }

  /** A resource as it is. */
  async bytes(name: string): Promise<ArrayBuffer | null> {
    return (await this.ready(name))?.arrayBuffer() ?? null;
  }

  /** The answer of the server; null where the run has no such resource. Throws its message where it failed. */
  async ask(address: string, method = "GET"): Promise<Response | null> {
    const headers = { Authorization: `Bearer ${this.token}` };
    const response = await fetch(address, { method, headers }).catch(() => {
      throw new Error("The server has ended. Start commtrace view again, and open the address that it prints.");
    });
    if (response.status === 204) return null;
    if (!response.ok) throw new Error(await response.text());
    return response;
  }

  private async ready(name: string): Promise<Response | null> {
    this.awaited++;
    try {
      for (;;) {
        const response = await this.ask(this.base + name);
        if (response?.status !== 202) return response;
        this.onProgress((await response.json()) as Progress);
        await new Promise((resolve) => setTimeout(resolve, AGAIN_AFTER));
      }
    } finally {
      if (--this.awaited === 0) this.onProgress(null);
    }
  }
}

/** `0-3,8`: ascending numbers in short. */
export function rangesOf(numbers: readonly number[]): string {
  const sorted = [...numbers].sort((a, b) => a - b);
  const parts: string[] = [];
  for (let first = 0; first < sorted.length; ) {
    let last = first;
    while (sorted[last + 1] === sorted[last]! + 1) last++;
    parts.push(last > first ? `${sorted[first]}-${sorted[last]}` : `${sorted[first]}`);
    first = last + 1;
  }
  return parts.join(",");
}
