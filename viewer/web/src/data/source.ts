import { type Columns, decodeColumns } from "./columns";
import type { RunData } from "./types";

/** The version of the data interface that this page reads (docs/viewer-data.md). */
export const VERSION = 1;

/** Where the data of a run come from: the page itself, or the server that sent it. */
export interface Source {
  run(): Promise<RunData>;
  table(name: string): Promise<Columns>;
}

export const STEP_TABLES = ["bounds", "work", "stalls", "host", "communication"] as const;

export type StepTables = Record<(typeof STEP_TABLES)[number], Columns>;

export async function readStep(source: Source, prefix: string): Promise<StepTables> {
  const tables = await Promise.all(STEP_TABLES.map((name) => source.table(`${prefix}/${name}`)));
  return Object.fromEntries(STEP_TABLES.map((name, index) => [name, tables[index]])) as StepTables;
}

/** Resources held in the page: JSON as it is, tables as gzip in base64. */
export class EmbeddedSource implements Source {
  async run(): Promise<RunData> {
    return checked(JSON.parse(this.text("run")) as RunData);
  }

  async table(name: string): Promise<Columns> {
    return decodeColumns(await unzipped(Uint8Array.from(atob(this.text(name)), (letter) => letter.charCodeAt(0))));
  }

  private text(name: string): string {
    const holder = document.getElementById(`resource:${name}`);
    if (!holder?.textContent)
      throw new Error(`the page does not hold ${name}: was it cut off when it was saved or sent?`);
    return holder.textContent;
  }
}

/** Resources of `commtrace view`; the token of the page's address is sent with each request. */
export class ServerSource implements Source {
  constructor(
    private readonly base: string,
    private readonly token: string,
  ) {}

  async run(): Promise<RunData> {
    return checked((await (await this.get("run")).json()) as RunData);
  }

  async table(name: string): Promise<Columns> {
    return decodeColumns(new Uint8Array(await (await this.get(name)).arrayBuffer()));
  }

  private async get(name: string): Promise<Response> {
    const response = await fetch(`${this.base}/${name}`, { headers: { Authorization: `Bearer ${this.token}` } });
    if (!response.ok) throw new Error(`${name}: ${await response.text()}`);
    return response;
  }
}

function checked(run: RunData): RunData {
  if (run.version !== VERSION) {
    throw new Error(
      `the data are of version ${run.version}, this page reads version ${VERSION}: write the report again`,
    );
  }
  return run;
}

async function unzipped(bytes: Uint8Array<ArrayBuffer>): Promise<Uint8Array> {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
